#!/usr/bin/env -S python -m nox -f
# /// script
# dependencies = ["nox[uv]>=2025.2.9"]
# ///
"""Every command of torchparts; `nox -l` is the table of contents."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "tests", "isolation"]

# uv ignores pip's variables and configuration, and separates values with commas.
if find_links := os.environ.get("PIP_FIND_LINKS"):
    os.environ.setdefault("UV_FIND_LINKS", ",".join(find_links.split()))
if cert := os.environ.get("PIP_CERT"):
    os.environ.setdefault("SSL_CERT_FILE", cert)
THREADS = os.environ.get("OMP_NUM_THREADS")  # the user's value, if any
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Otherwise each process would compile torch's source again while importing it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent
PACKAGES = {
    "ckpt-wrap": ROOT / "packages/ckpt-wrap",
    "mod-tracker": ROOT / "packages/mod-tracker",
    "flat-param": ROOT / "packages/flat-param",
    "sac-policies": ROOT / "packages/sac-policies",
    "conformance": ROOT / "conformance",
}
PARTS = [name for name in PACKAGES if name != "conformance"]
PINNED = "2.13"
OTHER_TORCH = {"2.9.0": "2.9", "2.11.0": "2.11", "newest": "2.15"}
TEST_TOOLS = [
    "pytest>=8",
    "pytest-timeout",
    "expecttest",
    "hypothesis",
    "sybil",
    "numpy",
    "hatchling",
    "hatch-fancy-pypi-readme>=25.1",
    "nox[uv]",
]
EXTRAS = ["matplotlib", "safetensors", "scipy"]
TEST_OPTIONS = ["--timeout=600", "--durations=10"]
GUIDES = [str(page) for page in sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/how-*/*.md")])]
NOT_NIGHTLY = ["-m", "not nightly"]


def constraint(torch_version: str = PINNED) -> list[str]:
    """Return the options that pin torch, so that no install picks another build."""
    return ["-c", str(ROOT / f"constraints/torch-{torch_version}.txt")]


def install_parts(session: nox.Session, *names: str, torch_version: str = PINNED) -> None:
    """Install distributions of this repository in editable form, by name."""
    editable = [arg for name in names for arg in ("-e", str(PACKAGES[name]))]
    session.install(*constraint(torch_version), *editable)


def tests_of(name: str) -> list[str]:
    """Return pytest's paths for one distribution: its tests and the code in its pages."""
    if name == "conformance":
        return ["conformance/tests", "conformance/README.md"]
    return [f"packages/{name}/tests", f"packages/{name}/src", f"packages/{name}/README.md"] + [
        str(page) for page in sorted(Path(f"docs/{name}").glob("*.md"))
    ]


SIMDEV = "tools/simdev"


def simdev_environment(session: nox.Session) -> dict[str, str] | None:
    """Return the variables for the simulated device; None if it cannot be built."""
    session.install(*constraint(), "ninja", "setuptools")
    env = {"PYTHONPATH": str(ROOT / SIMDEV)}
    told = str(session.run("python", "-W", "ignore", f"{SIMDEV}/probe.py", silent=True)).strip()
    if told == "nothing":
        return env
    session.warn(f"simdev: not run: {told}")
    return None


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, import layers, and the safety of the workflows."""
    session.install("ruff==0.17.5", "zizmor==1.32.0", "import-linter==2.16")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    sources = os.pathsep.join(str(path / "src") for path in PACKAGES.values())
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources}, silent=True)
    session.run("zizmor", "--offline", "--quiet", ".github/workflows", "conformance/action.yml")
    if actionlint := shutil.which("actionlint"):
        session.run(actionlint, external=True)
    else:
        session.log("actionlint is not installed: the workflows' syntax was not checked here")


@nox.session
def tests(session: nox.Session) -> None:
    """Run tests, types and the conformance suite, three at a time; or one: `-- NAME`."""
    install_parts(session, *PACKAGES)
    session.install(*constraint(), *TEST_TOOLS, *EXTRAS, "mypy==2.4.1")
    session.run("python", "tools/checks.py", *session.posargs)


@nox.session(default=False)
def simdev(session: nox.Session) -> None:
    """Test the simulated device, and run the packages' tests marked for accelerators on it."""
    install_parts(session, *PACKAGES)
    session.install(*constraint(), *TEST_TOOLS, *EXTRAS)
    env = simdev_environment(session)
    if env is None:
        return
    pytest = ["-m", "pytest", *TEST_OPTIONS]
    session.run("python", *pytest, *NOT_NIGHTLY, f"{SIMDEV}/tests", env=env)
    paths = [f"packages/{name}/tests" for name in PARTS]
    marked = [*pytest, "-m", "accelerator and not nightly", *paths, *session.posargs]
    session.run("python", "-m", "simdev", *marked, env=env)


DISTRIBUTIONS = {**{name: name for name in PARTS}, "conformance": "torchparts-conformance"}
BUILD_TOOLS = ["build", "hatchling>=1.26", "hatch-fancy-pypi-readme>=25.1"]


def build(session: nox.Session, package: str, out: Path, *options: str) -> None:
    """Build a distribution, dated by its last commit, so that two builds are equal."""
    folder = PACKAGES[package]
    log = ("git", "log", "-1", "--format=%ct", "--", str(folder))
    date = str(session.run(*log, external=True, silent=True)).strip()
    command = ["python", "-m", "build", "--no-isolation", "--outdir", str(out), *options]
    session.run(*command, str(folder), env={"SOURCE_DATE_EPOCH": date}, silent=True)


def check_isolation(session: nox.Session, folders: dict[str, Path]) -> None:
    """Check that each wheel is complete, and that it needs only torch.

    Args:
        session: that runs.
        folders: of the built files of each package.
    """
    session.install("twine", "check-wheel-contents", "basedpyright")
    clean = Path(session.create_tmp()) / "clean"
    session.run("python", "-m", "venv", "--without-pip", "--clear", str(clean), silent=True)
    python = str(clean / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python"))
    if session.venv_backend == "uv":
        pip = ["uv", "pip"]
        install, uninstall = [*pip, "install", "--python", python], [*pip, "uninstall"]
        uninstall += ["--python", python]
    else:
        session.install("pip>=24")
        pip = ["python", "-m", "pip", "--python", python]
        install, uninstall = [*pip, "install"], [*pip, "uninstall", "--yes"]
    session.run(*install, "--quiet", *constraint(), "torch", external=True)
    for package, out in folders.items():
        files = [str(path) for path in sorted(out.glob("*.*")) if path.is_file()]
        session.run("python", "-m", "twine", "check", "--strict", *files)
        (wheel,) = out.glob("*.whl")
        session.run("check-wheel-contents", str(wheel))
        # The wheel above was built from the sdist; this one is built from the folder.
        build(session, package, out / "direct", "--wheel")
        session.run(*install, "--quiet", *constraint(), str(wheel), external=True)
        script = ROOT / "tools/release/isolation.py"
        session.run(python, "-I", str(script), package, str(out), external=True)
        session.run(*uninstall, DISTRIBUTIONS[package], external=True, silent=True)
        shutil.rmtree(out / "direct")
    # Types of all public names, as another project's type checker sees them.
    parts = [name for name in folders if name in PARTS]
    wheels = [str(wheel) for name in parts for wheel in folders[name].glob("*.whl")]
    if wheels:
        session.install(*constraint(), *wheels)
    for name in parts:
        session.run("basedpyright", "--verifytypes", name.replace("-", "_"), "--ignoreexternal")


@nox.session
def isolation(session: nox.Session) -> None:
    """Build each distribution, install only its wheel, and check that it needs only torch."""
    out = Path(session.create_tmp()) / "dist"
    shutil.rmtree(out, ignore_errors=True)
    session.install(*BUILD_TOOLS)
    folders = {package: out / package for package in session.posargs or PACKAGES}
    for package, folder in folders.items():
        build(session, package, folder)
    check_isolation(session, folders)


@nox.session(default=False)
def rehearse(session: nox.Session) -> None:
    """Do everything that a release does, up to the upload: `-- [PACKAGE ...] [--tag TAG]`.

    Builds into `dist/`, checks these files, serves them from a local index, installs each
    distribution by name into an empty environment, and runs its README. The files are what a
    release uploads.
    """
    arguments, tag = [*session.posargs], ""
    if "--tag" in arguments:
        tag = arguments.pop(arguments.index("--tag") + 1)
        arguments.remove("--tag")
    if unknown := {*arguments} - {*PACKAGES}:
        session.error(f"no package is named {', '.join(unknown)}: {', '.join(PACKAGES)}")
    if tag and len(arguments) != 1:
        session.error("a tag belongs to one package: name it")
    dist, again = ROOT / "dist", Path(session.create_tmp()) / "again"
    for folder in (dist, again):
        shutil.rmtree(folder, ignore_errors=True)
    session.install(*BUILD_TOOLS, "pypiserver")
    install_parts(session, *PACKAGES)
    session.run("python", "tools/release/public_names.py")
    folders = {package: dist / package for package in arguments or PACKAGES}
    for package, folder in folders.items():
        build(session, package, folder)
        build(session, package, again / package)
        told = (str(PACKAGES[package]), DISTRIBUTIONS[package], tag, str(folder))
        session.run("python", "tools/release/release_tag.py", *told, str(again / package))
    check_isolation(session, folders)
    for package in folders:
        names = (DISTRIBUTIONS[package], str(PACKAGES[package] / "README.md"))
        session.run("python", "tools/release/from_index.py", str(dist), *names, *constraint())


@nox.session(default=False)
@nox.parametrize(
    "device",
    [
        nox.param("cpu", id="cpu"),
        nox.param("simdev", id="simdev"),
        nox.param("cuda", id="cuda", tags=["gpu"]),
    ],
)
def conformance(session: nox.Session, device: str) -> None:
    """Run the conformance suite on our implementation, on one device."""
    install_parts(session, *PACKAGES)
    if device == "simdev":
        conformance_on_simdev(session)
        return
    if device == "cuda":
        probe = "import torch; print(torch.cuda.is_available())"
        found = session.run("python", "-c", probe, silent=True)
        if "True" not in str(found):
            session.error("no CUDA device: nothing was checked")
    session.run(
        *("torchparts-conformance", "run", "--impl", "ours", "--device", device),
        *("--out", f"conformance-output/{device}", *session.posargs),
    )


def conformance_on_simdev(session: nox.Session) -> None:
    """Run the conformance suite on the simulated device, which is not CUDA."""
    env = simdev_environment(session)
    if env is None:
        return
    out = "conformance-output/simdev"
    session.run(
        *("python", "-m", "simdev", "-m", "torchparts_conformance", "run", "--impl", "ours"),
        *("--device", "simdev", "--out", out, *session.posargs),
        env=env,
        success_codes=[0, 1],
    )
    session.run("python", f"{SIMDEV}/known.py", f"{out}/report.json")


@nox.session(default=False)
def broken(session: nox.Session) -> None:
    """Run every broken implementation on the requirements that it must fail."""
    install_parts(session, *PACKAGES)
    folder = "conformance/tests/broken"
    session.run("torchparts-conformance", "mutants", folder, *session.posargs)


# Implementations inside torch.
TORCHS = ["torch", "fsdp1", "fsdp2", "torch-tools"]
# Optional peers.
PEERS = {
    "fairscale": ["fairscale==0.4.13"],
    "torch-remat": ["torch-remat==0.2.2"],
    "deepspeed": ["deepspeed==0.19.8"],
    "transformers": ["transformers==5.23.0"],
}


@nox.session(default=False, tags=["gpu"])
def gpu(session: nox.Session) -> None:
    """Run everything that needs an accelerator, and print the outcome."""
    install_parts(session, *PACKAGES)
    session.install(*constraint(), *TEST_TOOLS, *EXTRAS)
    session.run("python", "tools/release/gpu.py", *(session.posargs or ["gpu-output"]))


@nox.session(default=False)
@nox.parametrize("peer", list(PEERS), ids=list(PEERS))
def peers(session: nox.Session, peer: str) -> None:
    """Run the conformance suite on another implementation, with any verdict, for the matrix."""
    install_parts(session, "conformance")
    session.install(*constraint(), *PEERS[peer])
    session.run(
        *("torchparts-conformance", "run", "--impl", peer, "--device", "cpu", "--profile", "all"),
        *("--out", f"conformance-output/{peer}", *session.posargs),
        success_codes=[0, 1],
    )


# Libraries that people train with; timm's models need torchvision, which not every torch has.
LIBRARIES = [
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "diffusers==0.42.1",
    "fairscale==0.4.13",
    "lightning==2.6.6",
    "peft==0.21.2",
    "safetensors==0.8.0",
    "scipy==1.17.1",
    "timm==1.0.31",
    "torch-remat==0.2.2",
    "transformers==5.23.0",
    "trl==1.16.0",
    "xformers==0.0.35",
]


EXAMPLES = ["accelerate", "datasets", "diffusers", "lightning", "peft", "safetensors", "timm"]
EXAMPLES += ["transformers", "trl"]


def pins(*names: str) -> list[str]:
    """Return the pinned versions of some libraries."""
    return [pin for pin in LIBRARIES if pin.partition("==")[0] in names]


@nox.session(default=False)
def examples(session: nox.Session) -> None:
    """Run the short examples, each of which asserts its claim."""
    install_parts(session, *PARTS)
    session.install(*constraint(), "pytest>=8", "pytest-timeout", "sybil", *pins(*EXAMPLES))
    env = {"EXAMPLES_ALL": "1"}
    probe = "import torchvision"
    if "Error" in str(session.run("python", "-c", probe, silent=True, success_codes=[0, 1])):
        # It may be built for another build of torch, such as CUDA's; transformers imports it if
        # installed.
        session.warn("timm_resnet: not run: torchvision cannot be imported with this torch")
        uv = session.venv_backend == "uv"
        uninstall = ["uv", "pip", "uninstall"] if uv else ["python", "-m", "pip", "uninstall", "-y"]
        session.run(*uninstall, "torchvision", "timm", external=True)
        env = {}
    tests = ["tests/repository/test_short_examples.py", *GUIDES, *session.posargs]
    session.run("python", "-m", "pytest", *TEST_OPTIONS, *tests, env=env)


@nox.session(default=False, requires=[f"peers({peer})" for peer in PEERS])
def publish(session: nox.Session) -> None:
    """Run every implementation, and write the results file of the site."""
    install_parts(session, *PACKAGES)
    for ours in ("ours", *TORCHS):
        session.run(
            *("torchparts-conformance", "run", "--impl", ours, "--device", "cpu"),
            *("--profile", "all"),
            *("--out", f"conformance-output/{ours}", *session.posargs),
            success_codes=[0, 1],
        )
    reports = [f"conformance-output/{name}/report.json" for name in ("ours", *TORCHS, *PEERS)]
    session.run("torchparts-conformance", "publish", "docs/conformance/results.json", *reports)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Time the packages and torch's own tools in one run, and print the ratios."""
    install_parts(session, *PACKAGES)
    session.install(*constraint(), *TEST_TOOLS, *EXTRAS, "pytest-benchmark")
    wanted = session.posargs or PARTS
    for name in wanted:
        files = sorted(Path(f"packages/{name}/benchmarks").glob("bench_*.py"))
        scripts = [file for file in files if "__main__" in file.read_text(encoding="utf-8")]
        timed = [str(file) for file in files if file not in scripts]
        session.run("python", "-m", "pytest", "-s", "-q", *timed)
        for script in scripts:
            session.run("python", str(script))


@nox.session(default=False)
def slow(session: nox.Session) -> None:
    """Run the tests that are marked nightly because they take long."""
    install_parts(session, *PACKAGES)
    session.install(*constraint(), *TEST_TOOLS, *EXTRAS)
    paths = [path for name in PACKAGES for path in tests_of(name)] + ["tests/repository"]
    session.run("python", "-m", "pytest", *TEST_OPTIONS, "-m", "nightly", *paths)


@nox.session(default=False)
def integration(session: nox.Session) -> None:
    """Test the packages with other libraries and their models, as users do."""
    install_parts(session, *PACKAGES)
    session.install(*constraint(), "pytest>=8", "pytest-timeout", *LIBRARIES)
    env = {"HF_HUB_OFFLINE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}
    tests = session.posargs or ["tests/integration"]
    session.run("python", "-m", "pytest", "-q", "--timeout=1800", *tests, env=env)


@nox.session(default=False)
def stress(session: nox.Session) -> None:
    """Interrupt, kill, fork, fill disks and run long, thousands of times; every trial must pass."""
    install_parts(session, *PARTS)
    session.install(*constraint(), "numpy", "pytest>=8", "sybil")
    session.run("python", "-m", "pytest", "tests/stress/tests")
    session.run("python", "-m", "stress", *session.posargs, env={"PYTHONPATH": "tests"})


@nox.session(name="bench-real", default=False, tags=["gpu"])
def bench_real(session: nox.Session) -> None:
    """Compare ways to save memory on a whole training step of a Llama; uses a GPU if available."""
    install_parts(session, *PARTS)
    session.install(*constraint(), "transformers==5.23.0")
    session.run("python", "-m", "benchmarks.real", *session.posargs)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Train a small GPT with the parts, and print what each one saves."""
    install_parts(session, *PARTS)
    session.install(*constraint(), "rich", "matplotlib", "numpy")
    env = {"OMP_NUM_THREADS": THREADS or str(os.cpu_count() or 1)}
    session.run("python", "docs/examples/compare_gpt.py", *session.posargs, env=env)


def repository_address() -> str:
    """Return the address of the repository, for links to the source."""
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    return next(line.split()[1] for line in text.splitlines() if line.startswith("repository-code"))


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the site, and fail on any warning."""
    install_parts(session, *PACKAGES)
    session.install("mkdocs<2", "mkdocs-material", "mkdocstrings[python]", "ruff==0.17.5")
    env = {"NO_MKDOCS_2_WARNING": "1", "TORCHPARTS_REPOSITORY": repository_address()}
    session.run("mkdocs", "build", "--strict", *session.posargs, env=env)
    session.run("python", "tools/site/check_site.py", "site")


@nox.session(default=False, requires=["docs"])
def site(session: nox.Session) -> None:
    """Open every page of the site in a browser, and test its search."""
    session.install("playwright", "axe-playwright-python")
    if "TORCHPARTS_BROWSER" not in os.environ:
        install = ["playwright", "install", "chromium"]
        session.run(*install, success_codes=range(256))  # without a browser the script reports it
    told = session.run("python", "tools/site/look_at_site.py", "--probe", silent=True)
    if "not run" in str(told):
        session.skip(str(told).strip())
    session.run("python", "tools/site/look_at_site.py", "site")


@nox.session(default=False)
@nox.parametrize("version", list(OTHER_TORCH), ids=list(OTHER_TORCH))
def torch(session: nox.Session, version: str) -> None:
    """Run all tests and the conformance suite on another version of torch."""
    pinned = OTHER_TORCH[version]
    install_parts(session, *PACKAGES, torch_version=pinned)
    # Before 2.10, torch.export needs setuptools without declaring it.
    session.install(*constraint(pinned), *TEST_TOOLS, *EXTRAS, "setuptools")
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    paths = [path for name in PACKAGES for path in tests_of(name)]
    session.run("python", "-m", "pytest", *TEST_OPTIONS, *paths, *session.posargs)
    run = ["torchparts-conformance", "run", "--impl", "ours", "--device", "cpu"]
    known = ROOT / f"constraints/torch-{pinned}.known-failures.toml"
    if known.exists():
        run += ["--known-failures", str(known)]
    session.run(*run)


if __name__ == "__main__":
    nox.main()
