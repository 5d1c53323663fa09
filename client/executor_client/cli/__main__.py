"""`python -m executor_client.cli`."""

from __future__ import annotations

import sys

from executor_client.cli import main

sys.exit(main())
