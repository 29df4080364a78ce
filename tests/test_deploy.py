"""Compose file and manifests: against the schemas of their readers, against each other, and as plain processes."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import redis
import yaml
from deployed import (
    K8S,
    ROOT,
    Container,
    Unset,
    compose,
    containers,
    entrypoint,
    env_file,
    manifests,
    pods,
    services,
)
from processes import Stage, Started, contiguous, eventually, holds, steps
from torch.distributed.run import get_args_parser

from pipeline.audit import audit
from pipeline.broker import Broker
from pipeline.config import ROLES, Connection, TrainConfig
from pipeline.connect import verify
from pipeline.flags import parse
from pipeline.keys import GROUP, Keys
from pipeline.modes import agreed, check
from pipeline.server import find_server
from producers.sglang_cpu.serve import ServeConfig

PASSWORD = "correct-horse"
EXAMPLE = env_file((ROOT / ".env.example").read_text())
ENV = {**EXAMPLE, "REDIS_PASSWORD": PASSWORD}
DATA = ROOT / "tests" / "data"
OTHERS = ("demo", "engine-cpu")
"Services of the image that are no stage of a run."


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / name).read_text())
    return found


KINDS = {
    kind: {"$ref": f"#/$defs/{name}", "$defs": found["$defs"]}
    for found in (schema("kubernetes-1.34.json"), schema("keda-2.20.json"))
    for kind, name in found["kinds"].items()
}


def wrong(of: dict[str, Any], what: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(of).iter_errors(what)]


def unfit(one: dict[str, Any]) -> list[str]:
    return wrong(KINDS[f"{one['apiVersion']} {one['kind']}"], one)


# --- schemas


def test_the_compose_file_fits_the_compose_specification() -> None:
    raw = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert wrong(schema("compose-spec.json"), raw) == []
    assert wrong(schema("compose-spec.json"), compose(ENV)) == []
    raw["services"]["redis"]["healthchek"] = {}
    assert "healthchek" in str(wrong(schema("compose-spec.json"), raw))


@pytest.mark.parametrize("name", manifests())
def test_a_manifest_fits_the_schema_of_its_kind(name: str) -> None:
    one = manifests()[name]
    assert unfit(one) == []
    one["metadata"]["labls"] = {}
    assert "labls" in str(unfit(one))


def test_what_a_pod_has_too_much_or_wrong_is_found() -> None:
    trainer = manifests()["Job trainer"]
    trainer["spec"]["template"]["spec"]["restartPolicyy"] = "Never"
    trainer["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] = ["130"]
    scaled = manifests()["ScaledObject generator"]
    scaled["spec"]["triggers"][0]["metadata"]["streamLength"] = 8
    assert "restartPolicyy" in str(unfit(trainer))
    assert "130" in str(unfit(trainer))
    assert "8 is not of type 'string'" in str(unfit(scaled))


# --- what the schemas do not say


def images() -> Iterator[str]:
    yield from (service["image"] for service in compose(ENV)["services"].values())
    yield from (one["image"] for _, one in containers() if one["image"] != "millpond")  # kustomize adds its tag
    yield from re.findall(r"^ARG PYTHON=(.*)", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)


def test_images_are_named_by_version() -> None:
    assert [
        name for name in images() if "latest" in name or not re.search(r"[:.][\w.-]*\d|:(cpu|cuda|engine-cpu)$", name)
    ] == []
    bases = re.findall(r"^FROM (\S+)", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    assert bases == ["python:${PYTHON}", "python:${PYTHON}", "runtime", "runtime"]


def test_no_shell_stands_between_a_stop_signal_and_a_process() -> None:
    """A shell as process 1 passes no signal on, and the process is killed when the grace time is over."""
    lines = [c.words for c in (*services(ENV).values(), *pods(PASSWORD).values())]
    lines += [c.words for image in ("valkey", "lmsysorg") for c in services(ENV, image).values()]
    lines += [c["command"] for where, c in containers() if "command" in c and not where.endswith(": password")]
    assert [words for words in lines if {"sh", "bash", "-c"} & set(words) and "python" not in words] == []
    assert entrypoint() == ["/usr/bin/tini", "--", "millpond"]
    assert all(words[:2] == entrypoint()[:2] for words in lines if "millpond" in words)


def test_without_a_password_nothing_starts() -> None:
    assert EXAMPLE["REDIS_PASSWORD"] == ""
    with pytest.raises(Unset, match="REDIS_PASSWORD: set it in"):
        compose(EXAMPLE)


def test_the_password_is_on_no_command_line() -> None:
    lines = [c.words for c in (*services(ENV, "").values(), *pods(PASSWORD).values())]
    assert PASSWORD not in str(lines)
    health = [service.get("healthcheck") for service in compose(ENV)["services"].values()]
    assert PASSWORD not in str(health)


def test_nothing_but_the_package_goes_into_the_build() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert lines[1] == "*"
    assert kept == {"pyproject.toml", "README.md", "LICENSE", "pipeline", "producers", "consumers", "trainer"}


HEALTH = {
    "compose": compose(ENV)["services"]["redis"]["healthcheck"]["test"][1],
    "k8s": next(c for w, c in containers() if w == "StatefulSet redis: redis")["readinessProbe"]["exec"]["command"][2],
}


@pytest.mark.parametrize("where", HEALTH)
@pytest.mark.parametrize(
    ("says", "healthy"), [("PONG", True), ("LOADING Valkey is loading the dataset in memory", False), ("", False)]
)
def test_redis_is_healthy_when_it_says_so(where: str, says: str, healthy: bool, tmp_path: Path) -> None:
    """Its client ends with 0 also while the server loads."""
    client = tmp_path / "valkey-cli"
    client.write_text(f"#!/bin/sh\necho '{says}'\n")
    client.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    found = subprocess.run(["/bin/sh", "-c", HEALTH[where]], env={"PATH": path}, check=False)
    assert (found.returncode == 0) == healthy


def test_dependants_wait_for_a_redis_that_is_healthy() -> None:
    for name, service in compose(ENV)["services"].items():
        if name in services(ENV) and name not in OTHERS:
            assert service["depends_on"]["redis"] == {"condition": "service_healthy"}
            assert service["restart"].startswith("on-failure:")  # a bug does not restart for ever


def test_pods_name_only_what_is_there() -> None:
    known = manifests()
    for one in (one for one in known.values() if "template" in one.get("spec", {})):
        pod = one["spec"]["template"]["spec"]
        mounted = {m["name"] for c in (*pod.get("initContainers", []), *pod["containers"]) for m in c["volumeMounts"]}
        own = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])}
        assert mounted == own | {volume["name"] for volume in pod["volumes"]}
        for volume in pod["volumes"]:
            claim, config = volume.get("persistentVolumeClaim"), volume.get("configMap")
            assert claim is None or f"PersistentVolumeClaim {claim['claimName']}" in known
            assert config is None or f"ConfigMap {config['name']}" in known
    listed = set(yaml.safe_load((K8S / "kustomization.yaml").read_text())["resources"])
    assert listed == {path.name for path in K8S.glob("*.yaml")} - {"kustomization.yaml", "scaling.yaml"}


def test_generators_are_scaled_by_the_runs_own_bounds_and_keys(tmp_path: Path) -> None:
    """Where the ConfigMap says other sizes, the formula's numbers are to change with them."""
    job, file = manifests()["Job trainer"], tmp_path / "run.toml"
    file.write_text(manifests()["ConfigMap millpond"]["data"]["run.toml"])
    config = parse(TrainConfig, ["--config", str(file)], {}, "millpond train")
    rules, keys = agreed(config), Keys(config.run or "")
    scaled = manifests()["ScaledObject generator"]["spec"]
    triggers = {trigger["name"]: trigger["metadata"] for trigger in scaled["triggers"]}
    formula = scaled["advanced"]["scalingModifiers"]["formula"]
    assert formula == f"trainer > 0 ? max(1, min(fresh + retry, {rules.bound} - unsettled, {rules.in_flight})) : 0"
    assert triggers["fresh"]["stream"] == keys["prompts"]
    assert triggers["retry"]["stream"] == keys["prompts:retry"]
    assert triggers["unsettled"]["listName"] == keys["unsettled"]
    name, _, value = triggers["trainer"]["podSelector"].partition("=")
    assert job["spec"]["template"]["metadata"]["labels"][name] == value
    assert GROUP == "generators"


# --- command lines


def given(container: Container, config: Path) -> tuple[list[str], dict[str, str]]:
    """The words after `millpond`, and the environment with the files of the test."""
    words = container.words[container.words.index("millpond") + 1 :]
    return words, {k: v.replace("/etc/millpond/run.toml", str(config)) for k, v in container.env.items()}


STAGES = {**{f"compose {n}": c for n, c in services(ENV).items() if n not in OTHERS}, **pods(PASSWORD)}


@pytest.mark.parametrize("name", STAGES)
def test_a_command_line_is_one_that_millpond_takes(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "run.toml"
    file.write_text(manifests()["ConfigMap millpond"]["data"]["run.toml"])
    (role, *flags), env = given(STAGES[name], file)
    config = parse(ROLES[role], flags, env, f"millpond {role}")
    assert check(config) == []
    assert caplog.messages == []  # no variable that is not used
    assert isinstance(config, Connection)
    assert (config.redis_url, config.run) == (f"redis://:{PASSWORD}@redis:6379", "demo")
    if isinstance(config, TrainConfig):
        assert config.goes_on
        assert config.out == Path("/runs/demo")


def test_the_engine_without_a_gpu_is_the_server_of_millpond_sglang() -> None:
    (role, *flags), env = given(services(ENV)["engine-cpu"], Path())
    config = parse(ServeConfig, flags, env, "millpond sglang")
    assert role == "sglang"
    assert (str(config.hf_checkpoint), config.host, config.install) == ("/data/model", "0.0.0.0", False)
    assert f":{config.port}" in services(ENV)["generator-sglang-cpu"].env["MILLPOND_ENGINE_URL"]


def test_several_gpus_are_ranks_of_the_same_command() -> None:
    one, several = services(ENV)["trainer"].words, services(ENV)["trainer-gpu"].words
    assert several[:3] == [*one[:2], "torchrun"]
    found = get_args_parser().parse_args(several[3:])
    assert (found.nproc_per_node, found.no_python) == ("gpu", True)
    assert [found.training_script, *found.training_script_args] == one[2:]


# --- the cpu profile as plain processes


@contextmanager
def redis_service(folder: Path, password: str, where: str = "compose") -> Iterator[redis.Redis]:
    """Redis as the compose file or the manifest has it, but for the place of its files and where it listens."""
    socket, config = folder / "redis.sock", folder / "valkey.conf"
    config.write_text(CONFIGS[where](folder, password))
    place = ["--port", "0", "--unixsocket", str(socket)]
    with (folder / "redis.out").open("wb") as output:
        server = subprocess.Popen([str(find_server()), str(config), *place], stdout=output, stderr=output)
    try:
        eventually(lambda: socket.exists() or server.poll() is not None, "a Redis that listens")
        with closing(redis.Redis(unix_socket_path=str(socket), password=password)) as client:
            eventually(client.ping, "a Redis that answers")
            yield client
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def _of_compose(folder: Path, password: str) -> str:
    spec = compose({**ENV, "REDIS_PASSWORD": password})
    (mounted,) = spec["services"]["redis"]["configs"]
    assert spec["services"]["redis"]["command"] == ["valkey-server", mounted["target"]]
    return here(spec["configs"][mounted["source"]]["content"], folder)


def _of_the_manifest(folder: Path, password: str) -> str:
    """What the first container writes is included by the file of the second."""
    (first,) = (one for where, one in containers() if where == "StatefulSet redis: password")
    program, *words = first["command"]
    subprocess.run([program, *(here(w, folder) for w in words)], env={"REDIS_PASSWORD": password}, check=True)
    return here(manifests()["ConfigMap redis"]["data"]["valkey.conf"], folder)


CONFIGS = {"compose": _of_compose, "k8s": _of_the_manifest}


def here(text: str, folder: Path) -> str:
    """With the test's folders for the containers'."""
    for name, mine in {"/data": folder / "data", "/runs": folder / "runs", "/run/valkey": folder}.items():
        mine.mkdir(exist_ok=True)
        text = re.sub(rf"(?<![\w/]){name}(?=/|$|\n|\")", str(mine), text)
    return text


@pytest.mark.parametrize("where", CONFIGS)
def test_the_redis_that_is_deployed_is_one_that_millpond_takes(where: str, tmp_path: Path) -> None:
    with redis_service(tmp_path, PASSWORD, where) as client:
        assert verify(client) == []
        assert client.config_get("maxmemory") == {"maxmemory": str(4 << 30)}
        assert client.config_get("save") == {"save": ""}
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(unix_socket_path=str(tmp_path / "redis.sock")).ping()


class Deployed(Stage):
    """Services of a cpu profile, with the test's folders in the place of /data and /runs, and a free port."""

    def __init__(self, folder: Path, env: dict[str, str], port: str = "30000") -> None:
        super().__init__(folder)
        self.env, self.port = env, port

    def here(self, text: str) -> str:
        password = self.env["REDIS_PASSWORD"]
        text = text.replace(f"redis://:{password}@redis:6379", f"unix://:{password}@{self.folder}/redis.sock")
        text = text.replace("http://engine-cpu:30000", f"http://127.0.0.1:{self.port}")
        return here(self.port if text == "30000" else text, self.folder)

    def service(self, name: str, **changed: str) -> Started:
        one = services({**self.env, **changed})[name]
        words = one.words[one.words.index("millpond") + 1 :]
        return self.millpond(*map(self.here, words), **{k: self.here(v) for k, v in one.env.items()})

    def demo(self) -> None:
        words = services(self.env)["demo"].words
        assert words[:4] == [*entrypoint()[:2], "python", "-c"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", self.here(words[4])], check=True, env=env)


SMALL = {
    "MILLPOND_ROLLOUT_BATCH_SIZE": "4",
    "MILLPOND_N_SAMPLES_PER_PROMPT": "2",
    "MILLPOND_LR_WARMUP_ITERS": "0",
    "MILLPOND_SAVE_INTERVAL": "2",
}


def ready(broker: Broker) -> int:
    """Generators whose engines have started."""
    return sum(json.loads(info)["ready"] for info in broker.client.hvals(broker.keys["workers:info"]))


@pytest.mark.timeout(900)
def test_the_cpu_profile_runs_stops_when_told_and_goes_on_with_the_same_commands(tmp_path: Path) -> None:
    """`docker compose up --scale generator=2`, `stop`, `up`, with a generator less."""
    env = {**EXAMPLE, **SMALL, "REDIS_PASSWORD": secrets.token_hex(16), "MILLPOND_NUM_ROLLOUT": "100000"}
    out, names = tmp_path / "runs" / "demo", ("feeder", "generator", "generator", "trainer")
    with redis_service(tmp_path, env["REDIS_PASSWORD"]), Deployed(tmp_path, env) as stage:
        stage.demo()
        broker = Broker(stage.here(services(env)["feeder"].env["MILLPOND_REDIS_URL"]), Keys("demo"), "test", 30)
        with closing(broker):
            first = [stage.service(name) for name in names]
            eventually(lambda: len(steps(out)) >= 2, "two steps", 200)
            eventually(lambda: ready(broker) == 2, "both generators", 200)
            for process in first:
                process.kill(signal.SIGTERM)
            assert [process.wait() for process in first] == [0, 0, 0, 130]
            holds(audit(broker))
            done = contiguous(steps(out))
            more = [stage.service(name, MILLPOND_NUM_ROLLOUT=str(done + 2)) for name in dict.fromkeys(names)]
            assert [process.wait(200) for process in more] == [0, 0, 0]
            assert contiguous(steps(out)) == done + 2
            assert holds(audit(broker)).places["committed"] == 4 * (done + 2)
    said = "".join(process.said() for process in stage.started)
    assert env["REDIS_PASSWORD"] not in said
