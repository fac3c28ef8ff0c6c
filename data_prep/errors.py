"""The error of data preparation."""


class DataError(Exception):
    """Input or shards that cannot be used; one line naming the file and what would work."""

    exit_code = 2
