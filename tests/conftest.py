"""One thread for every process: the suite runs several at once, and results must not depend on their number."""

import contextlib
import os
import signal
import time

import pytest
import torch
from support.left_behind import abandoned, listening, marked, new_mark, own_servers, shared_memory

torch.set_num_threads(1)

GONE_S = 10.0
"""How long what the last test has started may take to be gone, before it counts as left behind."""


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_group_left():
    """Processes that later tests start would meet at this one's port; run Trainers in processes of their own."""
    yield
    assert not torch.distributed.is_initialized()
    assert "MASTER_PORT" not in os.environ


class NothingLeft:
    """Ends the run with an error when a test has left a process, a listening port or shared memory behind.

    The processes of a run carry its mark; those of others who use the machine at the same time do not.
    """

    def __init__(self) -> None:
        self.mark = new_mark()
        self.ports, self.memory = listening(), shared_memory()

    def processes(self) -> dict[int, str]:
        """Those of the run that still live, with their command lines."""
        return {pid: command for pid, command in marked(self.mark).items() if pid not in own_servers()}

    def left(self) -> list[str]:
        """What is there now, in words."""
        ports = listening() - self.ports
        memory = abandoned(shared_memory() - self.memory)
        return [
            *(f"process {pid}, {command}" for pid, command in self.processes().items()),
            *(f"listening port {port}" for port in sorted(ports)),
            *(f"/dev/shm/{name}" for name in sorted(memory)),
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session):
        """Look after all else has finished, with xdist its workers."""
        result = yield
        deadline = time.monotonic() + GONE_S
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        if left:
            session.config.get_terminal_writer().line("\nleft behind by the tests:\n  " + "\n  ".join(left), red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return result


def pytest_configure(config):
    """Watch over the run from its beginning; xdist's workers are part of what their controller watches over."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(NothingLeft())
