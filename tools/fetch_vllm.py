"""Download vLLM's source archive and keep its folders `examples` and `vllm`, from which tests/clients run the examples
and `vllm bench serve`.

    python tools/fetch_vllm.py FOLDER

`pip download` would run the archive's setup.py, which needs a compiler and CUDA's headers. So this script only asks pip
where the archive is, by pip's own configuration (index, proxy, certificates), and checks its hash.
"""

import hashlib
import io
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

from pip._internal.commands import create_command

ARCHIVE = "vllm-0.32.0.tar.gz"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"


def download() -> bytes:
    """Return the archive. Raises SystemExit if the index has none, or another one."""
    command: Any = create_command("download")
    options, _ = command.parse_args(["--no-binary=:all:"])
    with command.main_context():
        session = command.get_default_session(options)
        links = [found.link for found in command._build_package_finder(options, session).find_all_candidates("vllm")]
        link = next((link for link in links if link.filename == ARCHIVE), None)
        if link is None:
            raise SystemExit(f"the package index has no {ARCHIVE}")
        if link.is_file:
            archive = Path(link.file_path).read_bytes()
        else:
            response = session.get(link.url_without_fragment)
            response.raise_for_status()
            archive = response.content
    if hashlib.sha256(archive).hexdigest() != SHA256:
        raise SystemExit(f"{link.url_without_fragment} does not have the hash {SHA256}")
    return archive


def main(folder: Path) -> None:
    """Replace the folder by the archive's examples and Python sources."""
    root = ARCHIVE.removesuffix(".tar.gz")
    unpacked = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(download())) as archive:
        kept = (f"{root}/examples/", f"{root}/vllm/")
        members = [member for member in archive if member.name.startswith(kept)]
        archive.extractall(unpacked, members, filter="data")
    shutil.rmtree(folder, ignore_errors=True)
    (unpacked / root).rename(folder)
    shutil.rmtree(unpacked)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
