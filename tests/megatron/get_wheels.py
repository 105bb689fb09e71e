"""Download and unpack wheels of Megatron: `python get_wheels.py FOLDER [BRIDGE CORE]`, else all supported releases.

Dependencies are left out, because most need CUDA, and so is the wheels' wish for a version of Python.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

from threefold.interop.megatron.releases import known_releases


def main() -> None:
    folder, *named = sys.argv[1:]
    pairs = [(named[0], named[1])] if named else [(release.bridge, release.core) for release in known_releases()]
    for bridge, core in pairs:
        get_release(Path(folder), bridge, core)


def get_release(folder: Path, bridge: str, core: str) -> None:
    target, wheels = folder / bridge, folder / "downloaded" / bridge
    if target.exists():
        return
    names = [f"megatron-bridge=={bridge}", f"megatron-core=={core}"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
    subprocess.run([*pip, "--dest", str(wheels), *names], check=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)


if __name__ == "__main__":
    main()
