"""The way out of sandboxes: `egress` is the daemon's side, `proxy` a process of its own."""
