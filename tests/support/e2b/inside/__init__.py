"""The programs in a sandbox of the double. They have the standard library, and nothing of ours but this package."""
