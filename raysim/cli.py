"""The command line: commands, arguments, exit codes; no logic."""

import contextlib
import errno
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import click

from raysim.core.errors import RunError, UserError
from raysim.core.secrets import without_secrets
from raysim.core.signals import Signals


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="raysim")
def commands() -> None:
    """Simulate federated learning on label-skewed data, with synthetic images where they help most.

    \b
    Start here:
      raysim run quickstart
      raysim run quickstart allocation=none seed=3
      raysim list
    Commands, names and keys are completed by the shell after: eval "$(_RAYSIM_COMPLETE=bash_source raysim)"
    """


def _tell(line: str) -> None:
    """Show a line beside the output of a command, which programs may read."""
    click.echo(line, err=True)


def _as_override(_: click.Context, __: click.Parameter, address: str | None) -> tuple[str, ...]:
    return () if address is None else (f"resources.address={address}",)


def _joined(_: click.Context, __: click.Parameter, overrides: tuple[str, ...]) -> tuple[str, ...]:
    from raysim.config.yaml_io import joined

    return tuple(joined(overrides))


def _found_file(path: str) -> str:
    from raysim.config.yaml_io import find_file

    return str(find_file(path))


def _found(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    return None if path is None else _found_file(path)


def _keys(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """For the shell: the keys that begin so."""
    from raysim.config.load import light_keys

    return [f"{key}=" for key in light_keys() if key.startswith(begun)]


def _kinds(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    from raysim.config.registry import KINDS

    return [kind for kind in (*KINDS, "pretrain") if kind.startswith(begun)]


def _names(context: click.Context, __: click.Parameter, begun: str) -> list[str]:
    from raysim.config.registry import KINDS, available

    kind = context.params.get("kind")
    return [name for name in available(kind) if name.startswith(begun)] if kind in KINDS else []


_config = click.argument("config", type=click.Path(), callback=_found)
_overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", callback=_joined, shell_complete=_keys)
_address = click.option(
    "--address", metavar="HOST:PORT", callback=_as_override, help="A running Ray cluster: auto, or its address."
)


_NEWEST = "the newest"


@commands.command()
@click.argument("config", type=click.Path(), required=False, callback=_found)
@_overrides
@click.option(
    "--resume", is_flag=False, flag_value=_NEWEST, metavar="[FOLDER]",
    help="Go on where it stopped with the newest run of CONFIG, or with the run in FOLDER, which needs no CONFIG.",
)
@click.option("--accept-changes", is_flag=True, help="Resume although code or versions have changed since.")
@click.option("--dry-run", is_flag=True, help="Only say what would run where, and what is wrong, as `doctor CONFIG`.")
@_address
def run(
    config: str | None, overrides: tuple[str, ...], resume: str | None, accept_changes: bool, dry_run: bool,
    address: tuple[str, ...],
) -> None:
    """Run one experiment: deal out the data, make synthetic images, train the clients, aggregate.

    CONFIG is a YAML file, or the name of an example such as quickstart. KEY=VALUE changes single keys, such as
    allocation.beta=8 or seed=3. The last line of the output is the directory with everything that the run produced.
    """
    config, overrides, resumed = _resumed(config, overrides, resume)
    if dry_run:
        _examine(config, (*overrides, *address))
    click.echo(f"raysim: reading {config}")  # before the imports, which take seconds
    from raysim.lifecycle.entry import run as run_experiment

    result = run_experiment(config, (*overrides, *address), resume=resumed, accept_changes=accept_changes)
    click.echo(result.directory)


def _resumed(
    config: str | None, overrides: tuple[str, ...], resume: str | None
) -> tuple[str, tuple[str, ...], bool | str]:
    """(configuration, overrides, what to resume): the word after --resume may be any of the three."""
    resumed: bool | str = resume is not None
    if resume is not None and resume != _NEWEST:
        if "=" in resume and not Path(resume).exists():
            overrides = (resume, *overrides)
        elif Path(found := _found_file(resume)).is_file():
            config, overrides = found, (() if config is None else (config,)) + overrides
        else:
            if not Path(resume).is_dir():
                raise click.UsageError(f"--resume {resume}: there is no such folder")
            resumed = resume
            if config is None or ("=" in config and not Path(config).exists()):
                overrides = (() if config is None else (config,)) + overrides
                config = str(Path(resume) / "config.yaml")
    if config is None:
        raise click.UsageError("give a configuration: `raysim run quickstart`, or the path of a YAML file")
    return config, overrides, resumed


@commands.command()
@click.argument("config", type=click.Path(), required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", callback=_joined)
@click.option(
    "--for", "for_run", metavar="RUN", callback=_found, help="The file of a run or a sweep: train on its data; "
    "it then finds the weights.",
)
def pretrain(config: str | None, overrides: tuple[str, ...], for_run: str | None) -> None:
    """Train a class-conditional diffusion model that `run` can make synthetic images with.

    With --for, the defaults suit the images of the run, and no CONFIG is needed: `raysim pretrain --for my_run.yaml
    minutes=30`. CONFIG is a YAML file such as experiments/generators/digits.yaml; `raysim list pretrain` shows its
    keys. An interrupted training goes on where it stopped.
    """
    from raysim.config.yaml_io import joined

    if config is not None and "=" in config and not Path(config).exists():
        overrides = tuple(joined((config, *overrides)))
        config = None
    if config is None and for_run is None:
        raise click.UsageError(
            "give the configuration of a training, or that of the run that the weights are for: "
            "`raysim pretrain --for my_run.yaml`"
        )
    click.echo("raysim: loading")  # before the imports, which take seconds
    from raysim.commands.pretrain import pretrain as pretrain_generator

    click.echo(pretrain_generator(None if config is None else _found_file(config), overrides, for_run=for_run))


@commands.command()
@_config
@_overrides
@click.option("--policies", metavar="NAME,...", help="Policies to compare; by default every built-in one.")
@click.option("--betas", metavar="BETA,...", help="Budgets of FedEAS to tabulate, such as 4,8,12,16.")
@click.option("--seeds", metavar="0-29", help="Also show how the totals vary over the partitions of these seeds.")
@click.option("--json", "as_data", is_flag=True, help="Print the plan as JSON.")
@click.option("--no-measure", is_flag=True, help="Do not time images and training, for an answer at once.")
@click.option("--figures", type=click.Path(), metavar="DIR", help="Draw heat maps, Lorenz curves, budget curve.")
@click.option("--save-partition", type=click.Path(), metavar="PATH", help="Save who owns what as .json or .npz.")
def plan(
    config: str, overrides: tuple[str, ...], policies: str | None, betas: str | None, seeds: str | None, as_data: bool,
    no_measure: bool, figures: str | None, save_partition: str | None,
) -> None:
    """Show what each policy would cost and remove, before any image is made. Starts no Ray.

    CONFIG is a YAML file, KEY=VALUE as for `run`. experiments/cifar10_counts.yaml needs no data set, only label counts.
    Of the file of a sweep: what all its runs would take.
    """
    from raysim.commands.plan.plan import draw
    from raysim.commands.plan.plan import plan as make_plan
    from raysim.commands.plan.table import print_json, print_plan
    from raysim.data.partition_file import check_target, make_folder
    from raysim.data.partition_file import save_partition as save

    if figures is not None:
        make_folder(Path(figures).expanduser(), "--figures")
    if save_partition is not None:
        check_target(save_partition)
    if _is_sweep(config):
        options = (policies, betas, seeds, figures, save_partition)
        if any(option is not None for option in options):
            raise click.UsageError("of a sweep, `plan` takes --json and --no-measure alone")
        _plan_sweep(config, overrides, as_data, measure_speed=not no_measure)
        return
    planned = make_plan(
        config, overrides, policies=policies, betas=betas, seeds=seeds, measure_speed=not no_measure, say=_tell
    )
    (print_json if as_data else print_plan)(planned)
    if save_partition is not None:
        save(planned.partition, save_partition, planned.dataset.train_labels_N)
    for path in draw(planned, figures) if figures is not None else []:
        click.echo(path, err=True)
    planned.check()


def _is_sweep(config: str) -> bool:
    from raysim.config.load import command_for, read_config

    return command_for(read_config(config)[0]) == "raysim sweep"


def _plan_sweep(file: str, overrides: tuple[str, ...], as_data: bool, *, measure_speed: bool) -> None:
    from raysim.commands.plan.sweep_plan import plan_sweep, print_sweep_plan

    planned = plan_sweep(file, overrides, measure_speed=measure_speed, say=_tell)
    if as_data:
        click.echo(planned.as_json())
    else:
        print_sweep_plan(planned)


@commands.command()
@click.argument("file", type=click.Path(), callback=_found)
@_overrides
@_address
def sweep(file: str, overrides: tuple[str, ...], address: tuple[str, ...]) -> None:
    """Run every combination of a grid on one Ray, and tabulate mean and standard deviation over seeds.

    FILE is a YAML file with `base`, a configuration, and `grid`, lists of values for its keys; KEY=VALUE changes the
    base. What is finished is skipped when it is started again. The last line of the output is the directory of results.
    """
    from raysim.commands.sweep.entry import sweep as run_sweep

    result = run_sweep(file, (*overrides, *address))
    click.echo(result.directory)
    result.check()


@commands.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(), metavar="FOLDER...")
@click.option("--against", metavar="LABEL", help="What to compare the others with; by default the first of the grid.")
@click.option("--csv", type=click.Path(), metavar="FILE", help="Also write a row for each run of a sweep.")
@click.option("--target", type=float, metavar="ACCURACY", help="Tabulate what it took to reach it; as the sweep says.")
@click.option(
    "--format", "form", metavar="FORM", default="text",
    help="Of the tables on the terminal: text, markdown, latex or csv, the last three without anything else.",
)
@click.option("--output", type=click.Path(), metavar="DIR", help="Where to write; by default to the folder itself.")
def report(
    folders: tuple[str, ...], against: str | None, csv: str | None, target: float | None, form: str, output: str | None
) -> None:
    """Show what a run or a sweep found: its tables, paired differences over seeds, and figures.

    FOLDER is that of a run or of a sweep, in output.dir; several are put into one table; of a folder that holds such,
    the newest is taken. Tables as text, Markdown, LaTeX and CSV, figures as PNG and PDF, and report.html, one page with
    all of it, are written there. The last lines of the output are the figures and the page.
    """
    from raysim.commands.report.report import report as show_report

    for path in show_report(folders, against, csv, target=target, form=form, output=output):
        click.echo(path, err=form != "text")


@commands.command()
@click.argument("config", type=click.Path(), required=False, callback=_found)
@_overrides
@_address
def doctor(config: str | None, overrides: tuple[str, ...], address: tuple[str, ...]) -> None:
    """Show what this machine or cluster has, what would run where, and what is wrong, in one screen.

    With CONFIG, also whether that configuration would start here. Exit code 2 if something is wrong.
    """
    _examine(config, (*overrides, *address))


def _examine(config: str | None, overrides: tuple[str, ...]) -> NoReturn:
    from raysim.commands.doctor import examine

    report = examine(config, overrides, _tell)
    click.echo("\n".join(report.lines()))
    sys.exit(2 if report.wrong else 0)


@commands.command()
@click.argument("folder", type=click.Path(), default="experiments")
def init(folder: str) -> None:
    """Copy the examples that come with raysim into FOLDER (by default ./experiments), to be changed there."""
    from raysim.commands.init import init as copy_examples

    copied = copy_examples(folder)
    click.echo(f"{copied} holds the examples; begin with: raysim run {copied / 'quickstart.yaml'}")


@commands.command()
@click.argument("folder", type=click.Path(), required=False)
@click.option("--store", metavar="URI", help="The MLflow store, as tracking.uri; by default that of FOLDER, or auto.")
@click.option("--port", type=click.IntRange(1, 65535), default=5000, help="Port of 127.0.0.1; 5000 by default.")
def ui(folder: str | None, store: str | None, port: int) -> None:
    """Serve MLflow's pages of the runs, and tell the address of the page of the run or sweep in FOLDER.

    Without FOLDER, that of the newest experiment. Ends with Ctrl-C.
    """
    from raysim.commands.ui import ui as show_pages

    show_pages(folder, store, port, click.echo)


@commands.group()
def cache() -> None:
    """Show or empty the cache of synthetic and of decoded images, which all runs share."""


_cache_dir = click.option("--dir", "folder", type=click.Path(), help="Folder of the cache; by default as `run` has it.")


@cache.command("list")
@_cache_dir
def cache_list(folder: str | None) -> None:
    """Show what the cache holds: generator and seed, or the key of a decoded data set, images, size."""
    from raysim.commands.cache import show

    for line in show(folder):
        click.echo(line)


@cache.command("clear")
@_cache_dir
def cache_clear(folder: str | None) -> None:
    """Delete all cached images, at once; they can be made again."""
    from raysim.commands.cache import clear

    click.echo(clear(folder))


@commands.command("list")
@click.argument("kind", required=False, shell_complete=_kinds)
@click.argument("name", required=False, shell_complete=_names)
def list_plugins(kind: str | None, name: str | None) -> None:
    """Show every plug-in that a configuration can name, by section of the configuration.

    With KIND, such as allocation, those of that section; with a NAME, too, such as fedeas, the keys that it takes.
    `list pretrain` shows the keys of a training of a generator.
    """
    from raysim.config.plugin_help import describe, describe_keys

    if kind == "pretrain" and name is None:
        from raysim.generation.pretrain_config import PretrainConfig

        for line in describe_keys(PretrainConfig):
            click.echo(line)
        return
    if name is not None:
        for line in describe(str(kind), name):
            click.echo(line)
        return
    _list(kind)


def _list(only: str | None) -> None:
    from raysim.config.plugin_help import check_kind
    from raysim.config.registry import KINDS, available
    from raysim.config.schema import Config

    formatter = click.HelpFormatter(width=min(shutil.get_terminal_size().columns, 120))
    for kind in KINDS if only is None else [check_kind(only)]:
        if kind == "modifier":
            heading, about = "partition.<modifier>", "Changes to the partition, each a key of its own; off by default."
        else:
            heading, about = f"{kind}.name", Config.model_fields[kind].description or ""
        formatter.write(f"\n{click.style(heading, bold=True)}  {about}\n")
        formatter.indent()
        formatter.write_dl(sorted((name, doc) for name, (_, doc) in available(kind).items()))
        formatter.dedent()
    click.echo(formatter.getvalue().lstrip())
    click.echo("The keys of one of them: python -m raysim list allocation fedeas")
    click.echo("In YAML: `local: {name: fedprox, mu: 0.01}`; on the command line: local.name=fedprox local.mu=0.01")
    click.echo("Your own plug-ins, in any module that Python finds: local.name=package.module:attribute")


def _say_how_keys_are_set(error: click.NoSuchOption) -> None:
    """`--rounds 5` is a key for a command that takes KEY=VALUE."""
    takes_keys = error.ctx is not None and any(parameter.name == "overrides" for parameter in error.ctx.command.params)
    if not takes_keys or not error.option_name.startswith("--"):
        return
    from raysim.config.load import key_called

    word, key = error.option_name.lstrip("-"), None
    if error.ctx is not None and error.ctx.info_name != "pretrain":  # which has other keys
        key = key_called(word)
    written = [argument for argument in sys.argv if argument.partition("=")[0] == error.option_name]
    value = written[0].partition("=")[2] if written else ""
    if written and "=" not in written[0]:
        after = sys.argv[sys.argv.index(written[0]) + 1 :]
        value = after[0] if after and not after[0].startswith("--") and "=" not in after[0] else ""
    _say(f"keys are set without dashes: {key or word.replace('-', '_')}={value or 'VALUE'}")


def _told(error: RunError | OSError) -> str:
    """The message of an error; of one of the system's, the file and the cause, and what helps where a disk is full."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    place = error.filename or "the output cannot be written"
    return f"{place}: {error.strerror}{'; free space there' if error.errno == errno.ENOSPC else ''}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        click.echo(without_secrets(text), err=True)


def main() -> NoReturn:
    """Run a command; 0: success, 1: a run that failed, 2: input that cannot work, 130: interrupted."""
    try:
        here = str(Path.cwd())
    except FileNotFoundError:  # found out here, because libraries end the process without a word that helps
        _say("error: the working directory is gone; change to one that exists")
        sys.exit(2)
    if here not in sys.path and not sys.flags.safe_path:
        sys.path.append(here)  # for plug-ins in it, which `python -m raysim` finds by itself
    try:
        with Signals():  # from the first moment on; a run listens anew
            commands(prog_name="raysim", standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        if isinstance(error, click.NoSuchOption):
            _say_how_keys_are_set(error)
        sys.exit(2)
    except UserError as error:
        _say(f"error: {error}")
        sys.exit(2)
    except (RunError, OSError) as error:  # OSError: a disk that is full, a folder that went away
        _say(f"error: {_told(error)}")
        # On an interrupt click writes a new line first, which a terminal that is gone refuses.
        sys.exit(130 if isinstance(error.__context__, KeyboardInterrupt) else 1)
    except (KeyboardInterrupt, click.Abort) as stop:
        _say(f"interrupted {stop}".strip())
        sys.exit(130)
    sys.exit(0)
