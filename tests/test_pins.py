"""All lists of versions agree: pyproject ranges, CPU lock, conda environment, GPU constraints, TensorRT-LLM's own pins."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TRTLLM = json.loads((ROOT / "lib/trtllm_workshop/data/tensorrt_llm_pins.json").read_text(encoding="utf-8"))
ALLOWED = yaml.safe_load((ROOT / "pins.yml").read_text(encoding="utf-8"))
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def lines(path: Path) -> list[str]:
    """The lines of a requirements file without comments."""
    found = (line.split(" #")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in found if line and not line.startswith("#")]


def applies(requirement: Requirement, python: str) -> bool:
    environment = {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}.9",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
    }
    return requirement.marker is None or requirement.marker.evaluate(environment)  # type: ignore[arg-type]


def locked(python: str) -> dict[str, Version]:
    """Name and exact version of everything in the lock that a Linux machine with this Python installs."""
    found: dict[str, Version] = {}
    for line in lines(ROOT / "requirements-cpu.lock"):
        requirement = Requirement(line)
        if applies(requirement, python):
            (specifier,) = requirement.specifier
            name = canonicalize_name(requirement.name)
            assert specifier.operator == "==" and name not in found, line
            found[name] = Version(specifier.version)
    return found


def ranges() -> dict[str, SpecifierSet]:
    """Every requirement of pyproject.toml, extras included, by name."""
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    return {canonicalize_name((r := Requirement(text)).name): r.specifier for text in wanted}


def conda_pip() -> list[str]:
    (pip,) = [item["pip"] for item in CONDA["dependencies"] if isinstance(item, dict)]
    return list(pip)


def conda_requirements() -> dict[str, SpecifierSet]:
    found = [Requirement(line) for line in conda_pip() if not line.startswith("-")]
    return {canonicalize_name(r.name): r.specifier for r in found}


def gpu_constraints() -> dict[str, SpecifierSet]:
    return {
        canonicalize_name((r := Requirement(line)).name): r.specifier for line in lines(ROOT / "constraints-gpu.txt")
    }


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_holds_every_dependency_within_its_range(python: str) -> None:
    there = locked(python)
    missing = [name for name in ranges() if name not in there]
    assert not missing, f"not in requirements-cpu.lock: {missing}; run `make lock`"
    outside = {n: str(there[n]) for n, allowed in ranges().items() if not allowed.contains(there[n], prereleases=True)}
    assert not outside, f"outside pyproject's range: {outside}"


def test_the_lock_names_no_place_and_no_hash() -> None:
    text = "\n".join(lines(ROOT / "requirements-cpu.lock"))
    assert not re.search(r"https?:|file:|@|--|\+", text)


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_follows_what_was_fixed_by_hand(python: str) -> None:
    there = locked(python)
    for line in lines(ROOT / "requirements-cpu.in"):
        requirement = Requirement(line)
        if applies(requirement, python):
            assert requirement.specifier.contains(there[canonicalize_name(requirement.name)]), line


def test_the_running_environment_is_the_locked_one() -> None:
    """Only where `make` made it: its stamp says so."""
    import sys
    from importlib.metadata import PackageNotFoundError, version

    if not (Path(sys.prefix) / "workshop-stamp").is_file():
        pytest.skip("this Python was not set up by tools/setup_env.py")
    different = {}
    for name, wanted in locked(f"{sys.version_info.major}.{sys.version_info.minor}").items():
        try:
            if Version(version(name)).public != wanted.public:
                different[name] = f"{version(name)} instead of {wanted}"
        except PackageNotFoundError:
            different[name] = "missing"
    if sys.platform == "linux":
        assert not different


def test_pyproject_admits_what_tensorrt_llm_wants() -> None:
    refused = {
        name: f"{TRTLLM['packages'][name]['version']} is not in {allowed}"
        for name, allowed in ranges().items()
        if name in TRTLLM["packages"] and not allowed.contains(TRTLLM["packages"][name]["version"])
    }
    assert not refused, "on a GPU machine pip could not install this package beside TensorRT-LLM"
    build = [Requirement(text) for text in PROJECT["build-system"]["requires"]]
    assert all(r.specifier.contains(TRTLLM["packages"][r.name]["version"]) for r in build)


def test_tensorrt_llm_pins_are_consistent_and_sourced() -> None:
    for name, pin in TRTLLM["packages"].items():
        if "version" in pin:
            assert SpecifierSet(pin["requires"]).contains(pin["version"]), name
        assert pin["confidence"] in ("read", "reported"), name
        assert set(pin["source"].split(", ")) <= set(TRTLLM["sources"]), name


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_differs_from_tensorrt_llm_only_where_allowed(python: str) -> None:
    there, different = locked(python), {}
    for name, pin in TRTLLM["packages"].items():
        if name in there and not SpecifierSet(pin["requires"]).contains(there[name], prereleases=True):
            different[name] = str(there[name])
    allowed = {name: str(entry["locked"]) for name, entry in ALLOWED["differences"].items()}
    assert different == allowed, "pins.yml must list exactly the differences that there are"
    assert all(entry["reason"].strip() for entry in ALLOWED["differences"].values())


def test_pythons_agree_everywhere() -> None:
    allowed = SpecifierSet(PROJECT["project"]["requires-python"])
    assert [v for v in ("3.9", *PYTHONS, "3.13") if allowed.contains(v)] == list(PYTHONS)
    assert sorted(TRTLLM["python"]["wheels"] + ALLOWED["python"]["extra"]) == list(PYTHONS)
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == list(PYTHONS)
    setup = (ROOT / "tools/setup_env.py").read_text(encoding="utf-8")
    match = re.search(r"PREFERRED = \((.*)\)", setup)
    assert match and sorted(re.findall(r"[\d.]+", match.group(1))) == list(PYTHONS)
    assert "python=3.12" in CONDA["dependencies"]


def test_the_conda_environment_installs_what_the_course_and_tensorrt_llm_need() -> None:
    wanted = {"torch", "tensorrt-llm", "huggingface-hub", "hf-transfer", "transformers", "jupyterlab", "ipywidgets"}
    wanted |= {"matplotlib", "papermill", "pytest"}
    there = conda_requirements()
    assert wanted <= set(there)
    assert "openmpi" in CONDA["dependencies"]
    assert str(there["tensorrt-llm"]) == f"=={TRTLLM['target_version']}"
    assert "--constraint constraints-gpu.txt" in conda_pip() and conda_pip()[-1].startswith("--editable .[")
    names = [line if line.startswith("-") else canonicalize_name(Requirement(line).name) for line in conda_pip()]
    assert names.index("torch") < names.index("tensorrt-llm"), "torch comes first, so that its build is settled"


def overlap(first: SpecifierSet, second: SpecifierSet, names: list[str]) -> bool:
    return any(first.contains(v) and second.contains(v) for v in names)


def test_the_conda_environment_and_the_gpu_constraints_agree_with_all_pins() -> None:
    for source in (conda_requirements(), gpu_constraints()):
        for name, specifier in source.items():
            if name in TRTLLM["packages"]:
                # A local version (+cu130) is one build of the public version, which must fit.
                public = SpecifierSet(re.sub(r"\+\w+", "", str(specifier)))
                assert public.contains(TRTLLM["packages"][name]["version"]), (name, str(specifier))
            elif name in ranges():
                versions = [str(specifier)[2:], str(locked("3.12")[name])]
                assert overlap(specifier, ranges()[name], versions), (name, str(specifier))
    torch = gpu_constraints()["torch"]
    assert str(torch) == f"=={TRTLLM['packages']['torch']['version']}+cu130" == str(conda_requirements()["torch"])
    indexes = [line for line in conda_pip() if line.startswith("--extra-index-url")]
    assert any(line.endswith("/cu130") for line in indexes), "only the cu130 index has that build"


def test_the_first_cell_installs_the_same_versions() -> None:
    from trtllm_workshop import install_gpu

    pins = install_gpu.load_pins()
    assert pins["target_version"] == "1.2.1"
    constraints = [Requirement(line) for line in install_gpu.constraints(pins)]
    assert {canonicalize_name(r.name): r.specifier for r in constraints} == gpu_constraints()
    indexes = {install_gpu.TORCH_INDEX, install_gpu.NVIDIA_INDEX}
    assert indexes == {line.split()[1] for line in conda_pip() if line.startswith("--extra-index-url")}


def test_the_facts_on_the_gpu_machine_agree_with_the_words_of_environment_yml() -> None:
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    assert f"driver {TRTLLM['cuda']['driver_minimum']} or newer" in text
    assert f"{TRTLLM['disk_gb']['value']} GB of free disk" in text and "T4 cannot" in text


def test_the_kernel_packages_of_the_first_cell_are_those_of_pyproject() -> None:
    from trtllm_workshop import install_gpu

    named = {**install_gpu.KERNEL_PACKAGES, **install_gpu.REFERENCE_PACKAGES}
    requirements = {canonicalize_name((r := Requirement(text)).name): r.specifier for text in named.values()}
    assert requirements == {name: ranges()[name] for name in requirements}
    needed = {canonicalize_name(Requirement(text).name) for text in PROJECT["project"]["dependencies"]}
    assert needed <= set(requirements), "a dependency of the library that a rented machine's kernel would lack"
