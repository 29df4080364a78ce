"""What docker-compose.yml and deploy/k8s/ say, read as Compose and Kubernetes read it: variables put in, environments
put together, and each container as the process it would be."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
K8S = ROOT / "deploy" / "k8s"

_VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+)(?::(?P<how>[-?])(?P<word>[^}]*))?\})")


class Unset(Exception):
    """A variable that must have a value has none."""


def filled(text: str, env: Mapping[str, str]) -> str:
    """`text` with ${NAME}, ${NAME:-default}, ${NAME:?complaint} and $$ replaced; another $ is an error, as there."""

    def value(found: re.Match[str]) -> str:
        if found["dollar"]:
            return "$"
        known = env.get(found["name"], "")
        if not known and found["how"] == "?":
            raise Unset(f"{found['name']}: {found['word']}")
        return known or (found["word"] if found["how"] == "-" else "")

    assert "$" not in _VARIABLE.sub("", text), text
    return _VARIABLE.sub(value, text)


def interpolated(node: Any, env: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: interpolated(value, env) for key, value in node.items()}
    if isinstance(node, list):
        return [interpolated(value, env) for value in node]
    return filled(node, env) if isinstance(node, str) else node


def env_file(text: str) -> dict[str, str]:
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def compose(env: Mapping[str, str]) -> dict[str, Any]:
    """docker-compose.yml with the variables of a .env put in."""
    found: dict[str, Any] = interpolated(yaml.safe_load((ROOT / "docker-compose.yml").read_text()), env)
    return found


def entrypoint() -> list[str]:
    """The image's."""
    (line,) = re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    found: list[str] = json.loads(line)
    return found


def manifests() -> dict[str, dict[str, Any]]:
    """By kind and name."""
    paths = [path for path in sorted(K8S.glob("*.yaml")) if path.name != "kustomization.yaml"]
    found = [one for path in paths for one in yaml.safe_load_all(path.read_text())]
    return {f"{one['kind']} {one['metadata']['name']}": one for one in found}


@dataclass(frozen=True)
class Container:
    """A process of ours, in Compose or Kubernetes."""

    name: str
    words: list[str]
    "of the command line, entry point included"
    env: dict[str, str]


def services(env: Mapping[str, str], ours: str = "millpond:") -> dict[str, Container]:
    """Services of an image by their name; `env` is the .env, which they have as their environment."""
    found = {}
    for name, service in compose(env)["services"].items():
        if service["image"].startswith(ours):
            command = service.get("command", [])
            words = [*service.get("entrypoint", entrypoint()), *_words(command)]
            found[name] = Container(name, words, {**env, **service.get("environment", {})})
    return found


def _words(command: str | list[str]) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else command


def containers(kind: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """All containers of all pods, with where they stand."""
    for name, one in manifests().items():
        pod = one.get("spec", {}).get("template", {}).get("spec", {})
        for part in ("initContainers", "containers"):
            yield from ((f"{name}: {c['name']}", c) for c in pod.get(part, []))


def pods(secret: str) -> dict[str, Container]:
    """Containers of our image."""
    found = {}
    for where, one in containers():
        if one["image"] == "millpond":
            words = [*one.get("command", entrypoint()), *one.get("args", [])]
            found[where] = Container(where, words, _environment(one["env"], secret))
    return found


def _environment(variables: list[dict[str, Any]], secret: str) -> dict[str, str]:
    """$(NAME) is a variable that stands before."""
    env: dict[str, str] = {}
    for variable in variables:
        value = variable.get("value", secret)
        env[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda name: env[name[1]], value)
    return env
