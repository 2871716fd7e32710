"""Which images a folder holds: its splits, its classes, and what in it is no image of any class."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raysim.core.errors import UserError
from raysim.data.split_names import Split, split_of, splits_of

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_NO_IMAGES = {".txt", ".md", ".csv", ".json", ".xml", ".yaml", ".yml", ".html", ".db", ".ini", ""}
_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"II*\x00", b"MM\x00*")  # of PNG, JPEG, GIF, WebP, TIFF
_MACHINE_MADE = {"__MACOSX", "__pycache__", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found"}


@dataclass(frozen=True)
class Layout:
    """Where the splits of a folder of images are, and their classes in the order of their numbers."""

    roots: dict[Split, Path]
    class_names: list[str]


def is_hidden(name: str) -> bool:
    """Whether a file or folder was put there by a machine: `.ipynb_checkpoints`, `._000.png`, `__MACOSX`."""
    return name.startswith(".") or name in _MACHINE_MADE


def find_layout(
    path: str, root: Path, classes: Sequence[str] | None, splits: Mapping[Split, str] | None, notes: list[str]
) -> Layout:
    """The splits and classes of the folder `root`.

    path: what the user called it, for messages.  classes, splits: settle what names alone do not, None for what the
    names say.  notes: gets what was entered or passed over.
    Raises UserError where the names leave open what is a class and what is a split, where there is one class only, and
    where class folders hold what is more likely splits or classes.
    """
    if not root.is_dir():
        raise UserError(f"data.path = {path!r}: {root.absolute()} is a file; give a folder with a sub-folder per class")
    roots = _given_roots(root, splits) if splits else _found_roots(path, root, classes, notes)
    for split, folder in roots.items():
        if folder != root or split == "train":
            roots[split] = _unwrapped(folder, classes, notes, f"data.path = {path!r}")
    train, others = roots["train"], set(roots.values())
    there = [name for name in subfolders(train) if train / name not in others]
    if not there:
        raise UserError(f"data.path = {path!r}: no folder in {train.absolute()}; give one sub-folder per class")
    names = there if classes is None else _given_classes(path, train, classes)
    _say_left_out(train, there, names, notes)
    for split in roots.keys() - {"train"}:
        unknown = [name for name in subfolders(roots[split]) if name not in names and has_image(roots[split] / name)]
        if unknown and classes is None:
            where, known = _shown(roots[split], root), _shown(train, root)
            raise UserError(
                f"data.path = {path!r}: class {unknown[0]!r} is in {where}, but not in {known}; remove it, or name the "
                f"splits that are to be read with data.splits, such as data.splits={{train: {_shown(train, root)}}}"
            )
        _say_left_out(roots[split], unknown, [], notes)
    if classes is None:
        _check_names(path, train, names)
        for folder in roots.values():
            _check_nesting(path, folder, names)
        _say_order(names, notes)
    return Layout(roots, names)


def _shown(folder: Path, root: Path) -> str:
    return f"{folder.relative_to(root)}/" if folder != root and folder.is_relative_to(root) else str(folder)


def _given_roots(root: Path, splits: Mapping[Split, str]) -> dict[Split, Path]:
    if "train" not in splits:
        raise UserError(f"data.splits = {dict(splits)!r}: the folder of `train` is missing; give it (`.` for the path)")
    roots = {split: root / folder for split, folder in splits.items()}
    for split, folder in roots.items():
        if not folder.is_dir():
            there = ", ".join(subfolders(root)) or "none"
            raise UserError(
                f"data.splits: {split} = {splits[split]!r} is no folder in {root.absolute()} (its folders: {there})"
            )
    if len({folder.resolve() for folder in roots.values()}) < len(roots):
        raise UserError(f"data.splits = {dict(splits)!r}: two splits are one folder; give each its own")
    return roots


def _found_roots(path: str, root: Path, classes: Sequence[str] | None, notes: list[str]) -> dict[Split, Path]:
    """The folder of each split by its name; the root alone where it holds classes."""
    if classes is not None and _holds(root, classes):
        return {"train": root}
    root = _unwrapped(root, classes, notes, f"data.path = {path!r}")
    if classes is not None and _holds(root, classes):
        return {"train": root}
    there = subfolders(root)
    named = splits_of(there)
    if not named:
        return {"train": root}
    where = f"data.path = {path!r}: in {root.absolute()}"
    beside = [name for name in there if name not in named and has_image(root / name)]
    if beside:
        raise UserError(
            f"{where}, {_quoted(named)} is named like a split and stands beside {_quoted(beside)}; if all are classes, "
            f"name them with data.classes=[{', '.join(there)}]; if it is a split, name those that are to be read with "
            f"data.splits, such as data.splits={{train: {_train_among(named)}}}"
        )
    roots: dict[Split, Path] = {}
    for name, split in named.items():
        if split in roots:
            raise UserError(
                f"{where}, {roots[split].name!r} and {name!r} both mean the {split} split; say which with data.splits, "
                f"such as data.splits={{{split}: {name}}}"
            )
        if not subfolders(root / name) and has_image(root / name):
            raise UserError(
                f"{where}, {name!r} is named like a split but holds images without a folder per class; make one folder "
                "per class in it, name the splits that are to be read with data.splits, or, if it is a class, name all "
                f"with data.classes=[{', '.join(there)}]"
            )
        roots[split] = root / name
    if "train" not in roots:
        raise UserError(
            f"{where}, there is {_quoted(named)} and no folder called train; name the one with training images with "
            "data.splits, such as data.splits={train: FOLDER}"
        )
    _say_left_out(root, [name for name in there if name not in named], [], notes)
    return roots


def _train_among(named: Mapping[str, Split]) -> str:
    return next((name for name, split in named.items() if split == "train"), ".")


def _holds(root: Path, classes: Sequence[str]) -> bool:
    return all((root / name).is_dir() for name in classes)


def _unwrapped(root: Path, classes: Sequence[str] | None, notes: list[str], where: str) -> Path:
    """The folder inside all folders that only wrap one other, as archives do when they are unpacked."""
    start, names = root, subfolders(root)
    while len(names) == 1 and split_of(names[0]) is None and not (classes is not None and _holds(root, classes)):
        inner = subfolders(root / names[0])
        if not inner or any(is_image(file) for file in files(root) + files(root / names[0])):
            break
        root, names = root / names[0], inner
    if root != start:
        notes.append(f"{where}: the images are read from {root.absolute()}, the only folder in {start.absolute()}")
    return root


def _given_classes(path: str, root: Path, classes: Sequence[str]) -> list[str]:
    names = list(classes)
    if not names or len(set(names)) < len(names):
        raise UserError(f"data.classes = {names!r}: must name each class once, at least one")
    missing = [name for name in names if not (root / name).is_dir()]
    if missing:
        there = ", ".join(subfolders(root)) or "none"
        raise UserError(
            f"data.classes: {_quoted(missing)} is no folder in {root.absolute()} (its folders: {there}; data.path = "
            f"{path!r})"
        )
    return names


def _check_names(path: str, root: Path, names: Sequence[str]) -> None:
    """Refuse what is more likely a misread folder than a data set: one class, or a class called like a split."""
    like_split = list(splits_of(names))
    if like_split:
        raise UserError(
            f"data.path = {path!r}: the class {_quoted(like_split)} in {root.absolute()} is named like a split; if it "
            f"is a class, name all classes with data.classes=[{', '.join(names)}]; if it is a split, give the folder "
            "of each split with data.splits"
        )
    if len(names) == 1 and has_image(root / names[0]):
        raise UserError(
            f"data.path = {path!r}: there is one class only, the folder {names[0]!r} in {root.absolute()}; give the "
            f"folder that holds a sub-folder per class, or, if one class is meant, data.classes=[{names[0]}]"
        )


def _check_nesting(path: str, root: Path, names: Sequence[str]) -> None:
    """Refuse class folders whose own folders are more likely splits, folds or classes than parts of one class.

    A class may keep its images in one folder (`ant/images/0.png`), and may have folders beside images of its own.
    """
    inside = {name: _folders_with_images(root / name) for name in names if (root / name).is_dir()}
    all_named = f"if each folder is one class, name all with data.classes=[{', '.join(names)}]"
    for name, held in inside.items():
        folder = root / name
        entered = {folder.resolve()}
        while held:
            where = f"data.path = {path!r}: the class folder {name!r} in {root.absolute()}"
            like_split = list(splits_of(held))
            if like_split:
                raise UserError(
                    f"{where} holds {_quoted(like_split)}, named like a split, in {folder.absolute()}; put a folder "
                    f"per class into a folder per split, such as train/{name}, or, {all_named}"
                )
            twin = next((other for other in names if other != name and inside.get(other) == held), None)
            has_own = any(is_image(file) for file in files(folder))
            if len(held) > 1 and (twin is not None or not has_own):
                same = f", as {twin!r} does" if twin is not None else ""
                raise UserError(
                    f"{where} holds the folders {_quoted(held)} with images in {folder.absolute()}{same}; if they are "
                    f"the classes, give the folder that holds a sub-folder per class; {all_named}"
                )
            folder = folder / held[0]
            if len(held) > 1 or folder.resolve() in entered:
                break
            entered.add(folder.resolve())
            held = _folders_with_images(folder)


def _folders_with_images(folder: Path) -> list[str]:
    return [name for name in subfolders(folder) if has_image(folder / name)]


def _say_order(names: Sequence[str], notes: list[str]) -> None:
    """Note that folders 0 to 10 are numbered in the order of text, in which 10 comes before 2."""
    if all(name.isdecimal() for name in names) and sorted(names, key=int) != list(names):
        i = next(i for i, (name, other) in enumerate(zip(names, sorted(names, key=int), strict=True)) if name != other)
        notes.append(
            f"classes are numbered in the order of their names as text, so the folder {names[i]!r} is class {i}; "
            "data.classes gives another order"
        )


def _say_left_out(root: Path, there: Sequence[str], used: Sequence[str], notes: list[str]) -> None:
    left_out = [name for name in there if name not in used]
    if left_out:
        notes.append(f"folders in {root.absolute()} that are no class and are not read: {_quoted(left_out)}")


def _quoted(names: Sequence[str] | Mapping[str, object]) -> str:
    shown = list(names)
    return ", ".join(map(repr, shown[:5])) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder and was not put there by a machine, in the order of its names.

    Raises UserError for a folder that cannot be read, and for a link to nothing that could be a folder or an image.
    """
    try:
        with os.scandir(folder) as found:
            entries = sorted((entry for entry in found if not is_hidden(entry.name)), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"data.path: the folder {folder} cannot be read ({error.strerror})") from error
    for entry in entries:
        path = folder / entry.name
        if entry.is_symlink() and not path.exists() and path.suffix.lower() not in _NO_IMAGES - {""}:
            raise UserError(f"data.path: {path} is a link to {path.readlink()}, where nothing is; mend or remove it")
    return entries


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in a folder, hidden ones left out, in order."""
    return [entry.name for entry in _entries(folder) if entry.is_dir()]


def files(folder: Path) -> list[Path]:
    """What is in a folder beside other folders, hidden files left out, in the order of its names."""
    return [folder / entry.name for entry in _entries(folder) if not entry.is_dir()]


def is_image(file: Path) -> bool:
    """Whether a file is named like an image."""
    return file.suffix.lower() in IMAGE_SUFFIXES


def has_image(folder: Path) -> bool:
    """Whether there is an image anywhere in a folder."""
    return any(True for _ in _walk(folder, set()))


def images_in(folder: Path, others: Counter[str]) -> list[Path]:
    """All images in a folder and the folders in it, links followed, in the order of their paths.

    others: counts the suffixes of files that are neither images nor text, and images without a suffix.
    Raises UserError for a folder that is named like an image, a link to nothing, or a folder that cannot be read.
    """
    return sorted(_walk(folder, set(), others))


def _walk(folder: Path, seen: set[str], others: Counter[str] | None = None) -> list[Path]:
    real = os.path.realpath(folder)
    if real in seen:  # a link to a folder around it
        return []
    seen.add(real)
    found: list[Path] = []
    for entry in _entries(folder):
        path = folder / entry.name
        if entry.is_dir():
            if is_image(path):
                raise UserError(f"data.path: {path} is a folder though it is named like an image; rename or remove it")
            found += _walk(path, seen, others)
        elif is_image(path):
            if not path.is_file():
                raise UserError(f"data.path: {path} is no file though it is named like an image; remove it")
            found.append(path)
        elif others is not None and path.suffix.lower() not in _NO_IMAGES:
            others[path.suffix.lower()] += 1
        elif others is not None and not path.suffix and path.is_file() and _starts_like_image(path):
            others["images without a suffix"] += 1
    return found


def _starts_like_image(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(8).startswith(_STARTS)
    except OSError:
        return False


def read_bytes(file: Path) -> bytes:
    """The content of a file of the user's; UserError naming it where it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"data.path: {file} cannot be read ({error.strerror})") from error


def count_note(class_names: Sequence[str], counts: Mapping[str, Sequence[int]]) -> str:
    """One line with the images of each class in each split: `2 classes: ant 3 + 1, dog 2 + 0 (train + test)`."""
    per_class = [" + ".join(str(counts_C[c]) for counts_C in counts.values()) for c in range(len(class_names))]
    shown = [f"{name} {numbers}" for name, numbers in zip(class_names, per_class, strict=True)]
    listed = ", ".join(shown if len(shown) <= 20 else [*shown[:10], f"... {len(shown) - 11} more ...", shown[-1]])
    return f"{len(class_names)} classes: {listed} ({' + '.join(counts)})"
