"""The E2B backend: sandboxes that are rented."""
