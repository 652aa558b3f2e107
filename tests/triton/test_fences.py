"""An access beyond the fences around what a kernel is given is noticed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import fences
import pytest

SCRIPT = """
import sys, torch, triton, triton.language as tl
sys.path.insert(0, sys.argv[1])
import fences
torch.UntypedStorage.cpu = fences.between_fences

@triton.jit
def touch(x, at, WRITE: tl.constexpr):
    if WRITE:
        tl.store(x + at, 1)
    else:
        tl.store(x, tl.load(x + at))

for launch in range(2):  # the one side, then the other
    touch[(1,)](torch.zeros(5, dtype=torch.int32), int(sys.argv[2]), sys.argv[3] == "write")
print("not noticed")
"""


@pytest.mark.parametrize("how", ["read", "write"])
@pytest.mark.parametrize(("at", "noticed"), [(4, False), (5, True), (-1, True)])
def test_an_access_beyond_a_tensor_is_noticed(
    at: int, noticed: bool, how: str, tmp_path: Path
) -> None:
    script = tmp_path / "touch.py"  # a file, because Triton reads the source of a kernel
    script.write_text(SCRIPT)
    environment = dict(os.environ, TRITON_INTERPRET="1")
    command = [sys.executable, str(script), str(Path(fences.__file__).parent), str(at), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGSEGV if noticed else 0), done.stderr
    assert ("not noticed" in done.stdout) != noticed
