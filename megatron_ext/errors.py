"""The error a person sees as one line, with the exit code that says: do not requeue."""


class ConfigError(Exception):
    """A configuration that cannot run as asked. The message names the key and what would work."""

    exit_code = 2
