"""Training, test and validation splits by the names that people give their folders and files."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import Field

from raysim.core.errors import UserError

Split = Literal["train", "test", "validation"]
Validation = Annotated[
    Literal["ignore", "train", "test"],
    Field(description="A validation split: not read, trained on too, or tested on in place of any test split"),
]

_SPLITS: dict[str, Split] = {
    "train": "train", "training": "train", "trn": "train",
    "test": "test", "testing": "test", "tst": "test",
    "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation", "eval": "validation",
}
_SUFFIX = re.compile(r"[-_ ]?(set|split|data|images)$")


def split_of(name: str) -> Split | None:
    """The split that a name stands for, in any case: `Train`, `testing`, `val_images`; None for any other name."""
    plain = name.casefold()
    return _SPLITS.get(plain) or _SPLITS.get(_SUFFIX.sub("", plain))


def splits_of(names: Iterable[str]) -> dict[str, Split]:
    """The splits among the names of folders that lie together, by name.

    Beside the names that `split_of` knows, these are names that begin or end with the word for a split and are alike
    but for it, with training among them: `seg_train` and `seg_test`, but not `bullet_train` alone.
    """
    found: dict[str, Split] = {}
    alike: dict[tuple[str, str], dict[str, Split]] = {}
    for name in names:
        split = split_of(name)
        if split is not None:
            found[name] = split
            continue
        words = re.split(r"[-_ .]", name.casefold())
        if len(words) > 1 and words[-1] in _SPLITS:
            alike.setdefault(("ends", " ".join(words[:-1])), {})[name] = _SPLITS[words[-1]]
        elif len(words) > 1 and words[0] in _SPLITS:
            alike.setdefault(("begins", " ".join(words[1:])), {})[name] = _SPLITS[words[0]]
    for together in alike.values():
        if len(set(together.values())) > 1 and "train" in together.values():
            found |= together
    return found


def used_splits(
    present: Mapping[Split, str], validation: Validation, notes: list[str], path: str
) -> tuple[list[Split], list[Split]]:
    """(the splits that are trained on, those that are tested on), each in the order in which they are read.

    present: what each split is called where it was found, for messages.  notes: gets what is there and not read.
    Raises UserError where a validation split is asked for and there is none.
    """
    train: list[Split] = ["train"]
    test: list[Split] = ["test"] if "test" in present else []
    if "validation" not in present:
        if validation != "ignore":
            raise UserError(
                f"data.validation = {validation!r}: there is no validation split in {path}; leave the key out"
            )
        return train, test
    name = present["validation"]
    if validation == "ignore":
        notes.append(
            f"{name} is a validation split and is not read; data.validation=test tests on it, data.validation=train "
            "trains on it, too"
        )
    elif validation == "train":
        train.append("validation")
    else:
        if test:
            notes.append(f"{present['test']} is not read, because data.validation=test tests on {name}")
        test = ["validation"]
    return train, test
