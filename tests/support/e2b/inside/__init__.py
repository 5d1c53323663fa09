"""What runs in a sandbox of the double. It has the standard library, and nothing of ours but this package."""
