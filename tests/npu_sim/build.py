"""Build the simulated CANN runtime: ``python build.py FOLDER``. Needs gcc and an installed torch-npu.

FOLDER gets the libraries that torch-npu links to, a start-up hook (`npu_sim_kernels`), and ``env.sh``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("runtime.c", "hccl.c")
LIBRARIES = ("hccl", "ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "atb")
"""What torch-npu's libraries name as needed and CANN would bring. Here all are one."""
CANN = re.compile(r"acl|Hccl|Msprof|rt[A-Z]|_ZN?K?3atb|_ZNK?2ge")
"""Names of CANN's functions: acl, HCCL, profiler, driver, ATB, graph engine (the last two in C++)."""
ENTRY_POINT = "[torch.backends]\nnpu_sim = npu_sim_kernels:install\n"
STUB = """\
void stub_{number}(void) __asm__("{name}");
void stub_{number}(void) {{ missing("{name}"); }}
"""
STUBS_HEAD = """\
/* Made by build.py: functions that torch-npu links to and the simulator does not have. To call one ends the process. */
#include <stdio.h>
#include <stdlib.h>
__attribute__((unused)) static void missing(const char *name) {
    fprintf(stderr, "npu_sim: %s was called, which the simulator does not have\\n", name);
    abort();
}
"""


def libraries(distribution: str) -> Iterator[Path]:
    """Shared libraries that `import torch` loads of a distribution. It is not imported: without CANN that fails."""
    for file in metadata.files(distribution) or []:
        if file.suffix == ".so" and "dynamo" not in file.parts:
            yield Path(str(file.locate()))


def symbols(library: Path, kind: str) -> set[str]:
    """The dynamic symbols that a library defines ("defined") or asks for ("undefined"), without versions."""
    run = subprocess.run(
        ["nm", "--dynamic", "--format=posix", f"--{kind}-only", str(library)],
        capture_output=True, check=True, text=True,
    )  # fmt: skip
    return {line.split()[0].split("@")[0] for line in run.stdout.splitlines()}


def wanted() -> list[str]:
    """CANN's functions that the installed torch-npu links to."""
    found: set[str] = set()
    own: set[str] = set()
    for library in libraries("torch-npu"):
        found |= symbols(library, "undefined")
        own |= symbols(library, "defined")
    return sorted(name for name in found - own if CANN.match(name))


def compiled(folder: Path, *, lacking: set[str]) -> Path:
    """The one library, with stubs for `lacking`."""
    stubs = folder / "stubs.c"
    lines = [STUB.format(number=number, name=name) for number, name in enumerate(sorted(lacking))]
    stubs.write_text(STUBS_HEAD + "".join(lines))
    target = folder / "libnpu_sim.so"
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-incompatible-pointer-types")
    sources = [str(HERE / source) for source in SOURCES]
    subprocess.run(
        [
            "gcc",
            "-std=gnu11",
            "-O1",
            "-g",
            "-fPIC",
            "-shared",
            "-pthread",
            *warnings,
            "-o",
            str(target),
            *sources,
            str(stubs),
        ],
        check=True,
    )
    return target


def environment(folder: Path) -> dict[str, str]:
    """What a process needs for `import torch` to bring a simulated NPU."""
    return {
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": f"{folder}:{HERE}",
        "NPU_SIM_FOLDER": str(folder / "messages"),
    }


def build(folder: Path) -> int:
    """Build into `folder`, anew. Returns the number of stubs."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("messages", "npu_sim-0.dist-info"):
        (folder / name).mkdir(parents=True)
    # torch loads what is registered as a backend of it; the kernels come in by that door.
    (folder / "npu_sim-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: npu_sim\nVersion: 0\n")
    (folder / "npu_sim-0.dist-info" / "entry_points.txt").write_text(ENTRY_POINT)
    lacking = set(wanted()) - symbols(compiled(folder, lacking=set()), "defined")
    library = compiled(folder, lacking=lacking)
    for name in LIBRARIES:
        (folder / f"lib{name}.so").symlink_to(library.name)
    (folder / "env.sh").write_text("".join(f"export {k}='{v}'\n" for k, v in environment(folder).items()))
    return len(lacking)


if __name__ == "__main__":
    count = build(Path(sys.argv[1]).resolve())
    sys.stdout.write(f"built; {count} functions of CANN are stubs that end the process\n")
