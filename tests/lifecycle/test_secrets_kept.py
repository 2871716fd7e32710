"""Real runs with a secret in every place that may hold one: no file, no output and no store has it afterwards."""

import base64
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from raysim import Result, load_config
from raysim.commands.doctor import examine
from raysim.commands.plan.plan import plan
from raysim.commands.plan.table import print_json, print_plan
from raysim.commands.sweep.sweep import run_sweep
from raysim.core.errors import ConfigError, UserError
from raysim.data import remote
from raysim.engine.join import join

Run = Callable[..., Result]
SECRETS = ("pa55w0rd-of-data", "pa55w0rd-of-store", "t0ken-in-query")


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """A web server with an archive of images, which asks for a login; gives the address of it with a password."""
    monkeypatch.setattr(remote, "CACHE", tmp_path / "kept" / "data")
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (240, 8, 8), dtype=np.uint8), np.arange(240) % 4
    np.savez(tmp_path / "d.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    body = (tmp_path / "d.npz").read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic ")).decode()
            self.send_response(200 if given.startswith("me:pa55w0rd") else 401)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("ETag", '"1"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield lambda password: f"http://me:{password}@127.0.0.1:{server.server_port}/d.npz?token=t0ken-in-query"
    server.shutdown()


@pytest.fixture
def config(small: dict[str, Any], archive: Callable[[str], str], tmp_path: Path) -> dict[str, Any]:
    """A configuration with secrets: in the address of the data, and in that of a store that does not answer."""
    return {
        **small, "rounds": 1, "data": {"name": "npz", "path": archive(SECRETS[0])},
        "tracking": {"uri": f"http://me:{SECRETS[1]}@127.0.0.1:9/mlflow?token={SECRETS[2]}"},
        "output": {**small["output"], "dir": f"{tmp_path}/kept/runs", "cache": f"{tmp_path}/kept/cache"},
    }


def expect_none(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Fail where a secret stands in a file of a folder, in the name of one, or in what was printed."""
    said = capfd.readouterr()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    for secret in SECRETS:
        assert secret not in said.out + said.err
        for path in files:
            assert secret not in str(path)
            assert secret.encode() not in path.read_bytes(), path


def test_a_run_keeps_and_shows_no_secret_and_can_be_resumed_with_another(
    run: Run, config: dict[str, Any], archive: Callable[[str], str], tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # it would pause before each further try
    first = run(config)
    kept = yaml.safe_load((first.directory / "config.yaml").read_text())
    assert kept["tracking"]["uri"] == first.summary["mlflow_uri"] == "http://***@127.0.0.1:9/mlflow?token=***"
    stored = run(config, tracking={"uri": f"sqlite:///{tmp_path}/kept/mlflow.db"}, seed=1)
    assert stored.summary["mlflow_run_id"]
    changed = {**config, "data": {"name": "npz", "path": archive("pa55w0rd-which-is-new")}}
    again = run(changed, tracking={"uri": "none"}, rounds=2, resume=True)
    assert again.directory == first.directory
    with pytest.raises(ConfigError, match=r"data\.path = http://\*\*\*@127.*the secret is masked.*set data\.path to"):
        run(first.directory / "config.yaml", resume=True)
    with pytest.raises(UserError, match=r"tracking\.uri: in 'http://\*\*\*@127.*the secret is masked"):
        run(first.directory / "config.yaml", [f"data.path={config['data']['path']}"], rounds=3, resume=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", config["tracking"]["uri"])
    last = run(first.directory / "config.yaml", [f"data.path={config['data']['path']}"], rounds=3, resume=True)
    assert last.directory == first.directory
    expect_none(tmp_path / "kept", capfd)


def test_a_wrong_password_is_refused_by_name(archive: Callable[[str], str]):
    with pytest.raises(UserError, match=r"data\.path = 'http://\*\*\*@127.*token=.* cannot be read; check the address"):
        remote.local_copy(archive("wrong"))


def test_a_sweep_keeps_and_shows_no_secret(
    warm: object, config: dict[str, Any], archive: Callable[[str], str], tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
):
    """Two addresses of the data, which label the rows of the table."""
    file = tmp_path / "s.yaml"
    other = config["data"]["path"].replace("d.npz", "e.npz")
    config["tracking"] = {"uri": "none"}
    file.write_text(yaml.safe_dump({"base": config, "grid": {"data.path": [config["data"]["path"], other]}}))
    result = run_sweep(file)
    assert sorted(result.runs["axis.data.path"]) == [
        f"path http://***@127.0.0.1:{other.split(':')[3].split('/')[0]}/{name}.npz?token=***" for name in "de"
    ]
    assert not result.failed
    expect_none(tmp_path / "kept", capfd)


def test_plan_and_doctor_show_no_secret(config: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    planned = plan(config, measure_speed=False)
    print_plan(planned)
    print_json(planned)
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(config))
    for line in examine(file).lines():
        print(line)
    said = capfd.readouterr()
    assert "http://***@127.0.0.1:9/mlflow?token=***" in said.out
    assert not [secret for secret in SECRETS if secret in said.out + said.err]


def test_the_hash_of_a_configuration_does_not_depend_on_a_password(config: dict[str, Any]):
    changed = {**config, "data": {**config["data"], "path": config["data"]["path"].replace("pa55", "0ther")}}
    assert load_config(config).hash() == load_config(changed).hash()


@pytest.mark.parametrize("key", ["output.cache", "output.dir"])
def test_a_folder_at_an_address_is_refused_without_its_secret(config: dict[str, Any], key: str):
    with pytest.raises(ConfigError, match=rf"{key} = s3://\*\*\*@bucket: must be a folder of this machine") as raised:
        load_config(config, [f"{key}=s3://KEY:{SECRETS[0]}@bucket"])
    assert SECRETS[0] not in str(raised.value)


def test_the_address_of_a_cluster_is_refused_without_its_secret():
    with pytest.raises(UserError, match=r"ray://\*\*\*@host:10001 \(from resources.address\) would put"):
        join(f"ray://me:{SECRETS[0]}@host:10001", "resources.address", {})
