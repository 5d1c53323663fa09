"""Programs that tests of the egress service run as processes of their own."""

from pathlib import Path

PROGRAMS = Path(__file__).parent
