"""The configuration file and the state directory, trusted only if no other user could write them.

It owns the keys with their defaults and documentation, and the lock of the state directory. It must
not know what the values are used for.
"""

from executor_server.core.config.backend_config import DockerImage, DockerSection, E2BImage, E2BSection, LocalImage
from executor_server.core.config.config import Config, PoolSection, ServerSection, TracingSection, load, to_toml
from executor_server.core.config.console_config import ConsoleSection
from executor_server.core.config.egress_config import EgressSection
from executor_server.core.config.environments_config import EnvironmentsSection
from executor_server.core.config.fleet_config import FleetSection
from executor_server.core.config.gateway_config import GatewaySection
from executor_server.core.config.key_types import (
    DAY_S,
    GIB,
    KIB,
    MIB,
    NAME_FORM,
    UNSHOWN,
    BackendName,
    Bytes,
    ConfigError,
    Count,
    Form,
    ImageName,
    ImportPattern,
    Name,
    ReadForm,
    Seconds,
    Section,
    WrittenSize,
    each_once,
    is_name,
)
from executor_server.core.config.problems import (
    KeyPath,
    Problem,
    config_error,
    contradiction,
    cut,
    dotted,
    examined,
    refuse,
    some_of,
    undotted,
    validated,
)
from executor_server.core.config.state_dir import (
    AlreadyRunning,
    StateDir,
    StateDirError,
    claim,
    default_state_dir,
    read_token,
)
from executor_server.core.config.toml_file import parse_toml, read_bytes, read_trusted
