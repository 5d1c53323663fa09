"""Arguments: `FD` serves the daemon at the other end of this descriptor; `authority DIR` creates an authority."""

from __future__ import annotations

import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["authority"]:
        from executor_server.network.proxy.authority import AuthorityError, ensure_authority

        try:
            ensure_authority(Path(arguments[1]))
        except AuthorityError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        return 0
    from executor_server.network.proxy.server import serve

    return serve(int(arguments[0]))


sys.exit(main(sys.argv[1:]))
