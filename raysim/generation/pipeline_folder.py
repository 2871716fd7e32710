"""The folder of a diffusers pipeline: found here or on the hub, checked before anything is loaded, loaded safely.

Only safetensors are read, only classes of diffusers and transformers are built, and no code that comes with the weights
is run.  What a component lacks is an error, where diffusers would draw it at random and only warn.
"""

import functools
import hashlib
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from raysim.core.errors import UserError
from raysim.core.host import physical_bytes
from raysim.core.plain import PlainDict
from raysim.generation.weights_folder import PICKLES, pickle_refusal, read_json

INDEX = "model_index.json"
KEY = "generator.folder"
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}
_EXTRA = "pip install 'raysim[text]'"
_HUB = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_WEIGHTS = re.compile(r"(diffusion_pytorch_model|model)(\.(?P<variant>[^.]+?))?(-\d{5}-of-\d{5})?\.safetensors")
_LOAD_ERRORS = (OSError, ValueError, TypeError, RuntimeError, KeyError, ImportError, AttributeError, SafetensorError)


def takes(call: Callable[..., object], parameter: str) -> bool:
    """Whether a function has a parameter of this name."""
    return parameter in inspect.signature(call).parameters


@dataclass(frozen=True)
class Component:
    """A part of a pipeline, such as the UNet: its name and folder, and the class that reads it.

    weights: the files that are loaded; none for what has no parameters.  variant: the one in their names, such as fp16.
    """

    name: str
    folder: Path
    library: str
    class_name: str
    weights: tuple[Path, ...]
    variant: str | None

    def config(self) -> PlainDict:
        """What its config.json says; empty where it has none."""
        path = self.folder / "config.json"
        return read_json(path, KEY) if path.is_file() else {}


class PipelineFolder:
    """A pipeline that is on disk, and that can be loaded as far as can be told without loading it.

    folder: a folder of `DiffusionPipeline.save_pretrained`, or `owner/name` or `owner/name@revision` on the Hugging
    Face hub, which is downloaded once.  variant: the weights to take where there are several, such as fp16.
    Raises UserError for what is missing, damaged, a pickle, or of a class that is not diffusers' or transformers' own.
    """

    def __init__(self, folder: str, variant: str | None = None) -> None:
        self.called = folder
        self.path = _find(folder, variant)
        self.index = _read_index(self.path)
        self.components = _components(self.path, self.index, variant)
        self.kind = _pipeline_class(self.path, self.index, self.components)
        _require_weights(self.components)
        if variant is not None and all(component.variant is None for component in self.components.values()):
            raise UserError(f"generator.variant = {variant!r}: no file of weights in {self.path} has it in its name")

    def __str__(self) -> str:
        return f"the {self.kind.__name__} in {self.path}"

    def config(self, *names: str) -> PlainDict:
        """The configuration of the first component of these names that there is; empty for none."""
        found = [self.components[name] for name in names if name in self.components]
        return found[0].config() if found else {}

    def bytes_in(self, dtype: torch.dtype, without: str = "") -> int:
        """The memory of its weights once they are loaded as `dtype`, but for those of the component `without`."""
        return sum(
            _elements(file) * dtype.itemsize
            for component in self.components.values() if component.name != without
            for file in component.weights
        )

    def digests(self) -> dict[str, str]:
        """The sha256 of every file that is read, by its path in the folder."""
        read = [self.path / INDEX]
        for component in self.components.values():
            found = (path for path in component.folder.rglob("*") if path.is_file())
            read += [path for path in found if path.suffix != ".safetensors" and path.suffix.lower() not in PICKLES]
            read += component.weights
        return {path.relative_to(self.path).as_posix(): sha256_of(path) for path in sorted(set(read))}

    def scheduler(self, name: str | None) -> Any:  # diffusers has no types
        """The pipeline's own scheduler, or one of this class of diffusers with its settings."""
        import diffusers

        if "scheduler" not in self.components:
            raise UserError(f"{KEY}: {self} has no scheduler, so the number of steps cannot be set")
        own = self.load_component("scheduler")
        if name is None:
            return own
        kind = getattr(diffusers, name, None)
        if not (isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin)):
            raise UserError(f"generator.scheduler = {name!r} is no scheduler of diffusers, such as LCMScheduler")
        return kind.from_config(own.config)

    def load_component(self, name: str) -> Any:
        """Load a part without weights, such as a tokenizer; UserError where that fails."""
        component = self.components[name]
        try:
            return _class_of(component).from_pretrained(str(component.folder), local_files_only=True)
        except _LOAD_ERRORS as error:
            raise UserError(f"{KEY}: {component.folder} cannot be loaded: {error}") from None

    def load(self, dtype: torch.dtype, device: torch.device, *, checked: bool, **components: object) -> Any:
        """Load the pipeline onto a device.

        checked: with its safety checker, where it has one.  components: loaded parts to take in place of its own.
        Raises UserError where memory is too small, or weights do not fit the network that they are for.
        """
        self._check_memory(dtype, device, "" if checked else "safety_checker")
        loaded: dict[str, object] = dict(components)
        if not checked:
            loaded |= {"safety_checker": None, "requires_safety_checker": False}
        if takes(self.kind.__init__, "add_watermarker"):
            loaded["add_watermarker"] = False  # else on where a further package is installed
        try:
            with quiet():
                for component in self.components.values():
                    if component.weights and component.name not in loaded:
                        loaded[component.name] = _load_weights(component, dtype)
                pipe = self.kind.from_pretrained(
                    str(self.path), torch_dtype=dtype, use_safetensors=True, local_files_only=True, **loaded
                )
                pipe.to(device, dtype)
        except _LOAD_ERRORS as error:
            raise UserError(f"{KEY}: the pipeline in {self.path} cannot be loaded: {error}") from None
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _check_memory(self, dtype: torch.dtype, device: torch.device, without: str) -> None:
        needed = self.bytes_in(dtype, without)
        if device.type == "cuda":
            memory, what = torch.cuda.mem_get_info(device)[0], "free on the GPU"
        else:
            memory, what = physical_bytes(), "in this machine"
        if needed > memory:
            raise UserError(
                f"{KEY}: the weights of {self} take {needed / 1e9:,.1f} GB in {str(dtype)[6:]}, and there are "
                f"{memory / 1e9:,.1f} GB {what}; use fewer workers on it, generator.precision=bf16, or a smaller model"
            )


def _find(folder: str, variant: str | None) -> Path:
    path = Path(folder).expanduser()
    if (path / INDEX).is_file():
        return path
    hub = _HUB.fullmatch(folder)
    if path.exists() or hub is None:
        raise UserError(
            f"{KEY}: {folder} holds no {INDEX}; give a folder that a diffusers pipeline was saved in, or the name of "
            "one on the Hugging Face hub, as owner/name"
        )
    return _from_hub(hub["name"], hub["revision"], variant)


def _from_hub(name: str, revision: str | None, variant: str | None) -> Path:
    """The folder in the hub's cache; what is not there in full is downloaded."""
    import diffusers

    problem: Exception | None = None
    for only_here in (True, False):
        try:
            found = Path(diffusers.DiffusionPipeline.download(
                name, revision=revision, variant=variant, use_safetensors=True, local_files_only=only_here
            ))
            if not only_here or _is_complete(found, variant):
                return found
        except Exception as error:  # noqa: BLE001 - the hub's client raises those of its network library, too
            problem = error
    reason = problem.__cause__ or problem if problem is not None else ""
    raise UserError(
        f"{KEY}: {name} is no folder here, is not in the cache of the Hugging Face hub, and cannot be downloaded "
        f"({type(reason).__name__}: {str(reason).strip().split(chr(10))[0]}); check the name and the network, or run "
        f"`hf download {name}` where there is one and give the folder"
    )


def _is_complete(folder: Path, variant: str | None) -> bool:
    try:
        _require_weights(_components(folder, _read_index(folder), variant))
    except UserError:
        return False
    return True


def _read_index(folder: Path) -> PlainDict:
    return read_json(folder / INDEX, KEY)


def _components(folder: Path, index: PlainDict, variant: str | None) -> dict[str, Component]:
    found = {}
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list) or len(entry) != 2 or entry[0] is None:
            continue
        library, class_name = map(str, entry)
        inside = folder / name
        if not inside.is_dir():
            raise UserError(f"{KEY}: the folder {inside}, which {INDEX} names, is missing; get the whole pipeline")
        found[name] = Component(name, inside, library, class_name, *_weights(inside, variant))
    return found


def _weights(folder: Path, variant: str | None) -> tuple[tuple[Path, ...], str | None]:
    """The weight files to load, and the variant in their names; UserError for pickles alone and for damaged files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in files:
        if file.suffix.lower() in PICKLES and not any(file.parent.glob("*.safetensors")):
            raise UserError(pickle_refusal(file, KEY))
    by_variant: dict[str | None, list[Path]] = {}
    for file in files:
        if file.parent == folder and (named := _WEIGHTS.fullmatch(file.name)):
            by_variant.setdefault(named["variant"], []).append(file)
    if not by_variant:
        return (), None
    taken = variant if variant in by_variant else None
    if taken not in by_variant:
        there = ", ".join(str(name) for name in by_variant)
        raise UserError(
            f"{KEY}: {folder} holds weights of the variant {there} only; choose it with generator.variant={there}"
        )
    for file in by_variant[taken]:
        _elements(file)
    return tuple(by_variant[taken]), taken


@functools.cache
def _counted(path: Path, size: int, changed_ns: int) -> int:  # noqa: ARG001 - so that another file is read again
    with safe_open(path, framework="pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - it is no dict
    return sum(functools.reduce(int.__mul__, shape, 1) for shape in shapes)


def _elements(file: Path) -> int:
    """How many numbers a file of weights holds, by its header; UserError for a damaged file."""
    try:
        return _counted(file, file.stat().st_size, file.stat().st_mtime_ns)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{KEY}: {file} is damaged or cut ({error}); get it again") from None


@functools.cache
def _hashed(path: Path, size: int, changed_ns: int) -> str:  # noqa: ARG001 - so that another file is read again
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of(file: Path) -> str:
    """The sha256 of a file in hex; gigabytes are read once in a process, unless they change."""
    return _hashed(file, file.stat().st_size, file.stat().st_mtime_ns)


def _pipeline_class(folder: Path, index: PlainDict, components: dict[str, Component]) -> Any:
    """The class of diffusers that the index names; UserError for any other, and for what it needs and is missing."""
    import diffusers

    for component in components.values():
        own = component.library in ("diffusers", "transformers") or hasattr(diffusers.pipelines, component.library)
        if not own:
            raise UserError(
                f"{KEY}: {folder / INDEX} takes {component.name} from {component.library!r}, which is not diffusers "
                "or transformers; code that comes with weights is not run"
            )
        if component.library == "transformers":
            require_text(f"{KEY}: {folder} holds a {component.class_name}")
    name = index.get("_class_name")
    kind = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, diffusers.DiffusionPipeline)):
        raise UserError(
            f"{KEY}: {folder / INDEX} names {name!r}, which is no pipeline of diffusers {diffusers.__version__}; code "
            "that comes with weights is not run"
        )
    return kind


def require_text(what: str, packages: tuple[str, ...] = ("transformers",)) -> None:
    """Raise UserError that says how to install these packages where one is missing; what: the beginning of it."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(f"{what}, which needs {' and '.join(missing)}; install it with: {_EXTRA}")


def _class_of(component: Component) -> Any:
    import diffusers

    if component.library == "transformers":
        import transformers as library
    else:
        library = diffusers if component.library == "diffusers" else getattr(diffusers.pipelines, component.library)
    found = getattr(library, component.class_name, None)
    if found is None:
        raise UserError(f"{KEY}: {component.library} has no {component.class_name}, the class of {component.folder}")
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which diffusers and transformers draw no progress bars and warn of nothing."""
    libraries = [sys.modules[f"{name}.utils.logging"] for name in ("diffusers", "transformers") if name in sys.modules]
    before = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of a new name for `torch_dtype`
            yield
    finally:
        for library, verbosity in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
            library.enable_progress_bar()


def _require_weights(components: dict[str, Component]) -> None:
    for component in components.values():
        kind = None if component.weights else _class_of(component)
        if isinstance(kind, type) and issubclass(kind, torch.nn.Module):
            raise UserError(f"{KEY}: {component.folder} holds no weights (*.safetensors); get the whole pipeline")


def _load_weights(component: Component, dtype: torch.dtype) -> Any:
    """Load a network; UserError where its file lacks weights or has them in another shape."""
    import diffusers

    kind = _class_of(component)
    as_dtype = {"torch_dtype": dtype} if issubclass(kind, diffusers.ModelMixin) else {"dtype": dtype}
    model, info = kind.from_pretrained(
        str(component.folder), use_safetensors=True, local_files_only=True, variant=component.variant,
        output_loading_info=True, **as_dtype,
    )
    lacking = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if lacking:
        raise UserError(
            f"{KEY}: the weights in {component.folder} do not fit the {component.class_name} in its config.json: "
            f"{len(lacking)} tensors are missing or of another shape, such as {lacking[0]}"
        )
    return model.eval()
