"""SHA-256 beside other work: a thread hashes a block while its owner reads or writes the next."""

import hashlib
from collections.abc import Buffer
from threading import Thread

SMALLEST_BYTES = 1 << 18
"""Below, a thread costs more than it saves."""


class BackgroundDigest:
    """Used like a hashlib object.

    At most one block is being hashed; its memory must not change until the next call.
    """

    def __init__(self) -> None:
        self._digest, self._thread = hashlib.sha256(), None

    def update(self, block: Buffer) -> None:
        self._wait()
        if memoryview(block).nbytes < SMALLEST_BYTES:
            self._digest.update(block)
            return
        self._thread = Thread(target=self._digest.update, args=(block,))
        self._thread.start()

    def hexdigest(self) -> str:
        self._wait()
        return self._digest.hexdigest()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
