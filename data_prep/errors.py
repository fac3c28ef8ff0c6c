"""The errors of data preparation."""


class DataError(Exception):
    """Input or shards that cannot be used; one line naming the file and what would work."""

    exit_code = 2


class WorkerError(Exception):
    """A worker process ended by itself: killed, out of memory, or crashed."""

    exit_code = 76


class Stopped(Exception):
    """A signal asked to stop; finished units are kept, and the same command continues."""

    exit_code = 75
