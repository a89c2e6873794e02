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
nox.options.sessions = [
    "lint",
    "types",
    "tests",
    "repository",
    "isolation",
    "conformance(cpu)",
]

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


each_package = nox.parametrize("package", list(PACKAGES), ids=list(PACKAGES))
each_tested = nox.parametrize("package", [*PACKAGES, "simdev"], ids=[*PACKAGES, "simdev"])

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
def types(session: nox.Session) -> None:
    """Check the types of all five distributions, strictly."""
    install_parts(session, *PACKAGES)
    session.install("mypy==2.4.1", "safetensors")
    session.run("mypy", *(str(path / "src") for path in PACKAGES.values()))


@nox.session
@each_tested
def tests(session: nox.Session, package: str) -> None:
    """Run one distribution's tests, with no other distribution of this repository installed."""
    if package == "simdev":
        tests_on_simdev(session)
        return
    install_parts(session, *(PACKAGES if package == "conformance" else [package]))
    session.install(*constraint(), *TEST_TOOLS, *EXTRAS)
    tests = [*tests_of(package), *session.posargs]
    session.run("python", "-m", "pytest", *TEST_OPTIONS, *NOT_NIGHTLY, *tests)


def tests_on_simdev(session: nox.Session) -> None:
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


@nox.session
def repository(session: nox.Session) -> None:
    """Test the repository: structure, scripts, examples, pages."""
    install_parts(session, *PACKAGES)
    session.install(*constraint(), *TEST_TOOLS, *EXTRAS)
    pages = ["README.md", *GUIDES]
    session.run("python", "-m", "pytest", *TEST_OPTIONS, *NOT_NIGHTLY, "tests/repository", *pages)


@nox.session
@each_package
def isolation(session: nox.Session, package: str) -> None:
    """Build a distribution, install only its wheel, and check that it needs only torch."""
    out = Path(session.create_tmp()) / "dist"
    shutil.rmtree(out, ignore_errors=True)
    has_uv = session.venv_backend == "uv"
    builder, installer = ("build[uv]", "uv") if has_uv else ("build", "pip")
    session.install(builder, "twine", "check-wheel-contents", "basedpyright")
    build = ["python", "-m", "build", "--installer", installer, "--outdir"]
    session.run(*build, str(out), str(PACKAGES[package]), silent=True)
    session.run("python", "-m", "twine", "check", "--strict", *map(str, sorted(out.iterdir())))
    (wheel,) = out.glob("*.whl")
    session.run("check-wheel-contents", str(wheel))
    # The wheel above was built from the sdist; this one is built from the folder.
    session.run(*build, str(out / "direct"), "--wheel", str(PACKAGES[package]), silent=True)
    clean = Path(session.create_tmp()).parent / "clean"
    session.run("python", "-m", "venv", "--without-pip", "--clear", str(clean), silent=True)
    python = clean / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if has_uv:
        install = ["uv", "pip", "install", "--quiet", "--python", str(python)]
    else:
        session.install("pip>=24")
        install = ["python", "-m", "pip", "--python", str(python), "install", "--quiet"]
    session.run(*install, *constraint(), str(wheel), external=True)
    script = ROOT / "tools/release/isolation.py"
    session.run(str(python), "-I", str(script), package, str(out), external=True)
    if package in PARTS:
        # Types of all public names, as another project's type checker sees them.
        session.install(*constraint(), str(wheel))
        session.run("basedpyright", "--verifytypes", package.replace("-", "_"), "--ignoreexternal")


@nox.session
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
# Optional peers, with dependencies that their metadata omit.
PEERS = {
    "fairscale": ["fairscale==0.4.13"],
    "xformers": ["xformers==0.0.35", "scipy"],
    "torch-remat": ["torch-remat==0.2.2"],
    "torchtune": ["torchtune==0.6.1", "torchao==0.9.0"],
    "deepspeed": ["deepspeed==0.19.8"],
    "transformers": ["transformers==5.23.0"],
    "lightning": ["lightning==2.6.6"],
    "torchtitan": ["torchtitan==0.3.0"],
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
    "diffusers==0.42.1",
    "fairscale==0.4.13",
    "lightning==2.6.6",
    "peft==0.21.2",
    "safetensors==0.8.0",
    "scipy==1.17.1",
    "timm==1.0.31",
    "torch-remat==0.2.2",
    "transformers==5.23.0",
    "xformers==0.0.35",
]


EXAMPLES = ["accelerate", "diffusers", "lightning", "peft", "safetensors", "timm", "transformers"]


def pins(*names: str) -> list[str]:
    """Return the pinned versions of some libraries."""
    return [pin for pin in LIBRARIES if pin.partition("==")[0] in names]


@nox.session(name="release-check", default=False)
@each_package
def release_check(session: nox.Session, package: str) -> None:
    """Check that version, tag, changelog, files and public names of a release agree.

    Pass the tag after `--`.
    """
    folder, out = PACKAGES[package], Path(session.create_tmp()) / "dist"
    shutil.rmtree(out, ignore_errors=True)
    session.install("build")
    changed = session.run(
        *("git", "log", "-1", "--format=%ct", "--", str(folder)), external=True, silent=True
    )
    env = {"SOURCE_DATE_EPOCH": str(changed).strip()}
    builds = [str(out / name) for name in ("one", "other")]
    for build in builds:
        session.run("python", "-m", "build", "--outdir", build, str(folder), env=env, silent=True)
    install_parts(session, *PACKAGES)
    session.run("python", "tools/release/public_names.py")
    tag = session.posargs[0] if session.posargs else ""
    distribution = "torchparts-conformance" if package == "conformance" else package
    session.run("python", "tools/release/release_tag.py", str(folder), distribution, tag, *builds)


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
    install_parts(session, *PARTS)
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
    session.run("python", "tools/bench_real.py", *session.posargs)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Train a small GPT with the parts, and print what each one saves."""
    install_parts(session, *PARTS)
    session.install(*constraint(), "rich", "matplotlib", "numpy")
    env = {"OMP_NUM_THREADS": THREADS or str(os.cpu_count() or 1)}
    session.run("python", "docs/examples/compare_gpt.py", *session.posargs, env=env)


def repository_address(session: nox.Session) -> str:
    """Return the URL that the clone came from, for links to the source; "" if it is no web page."""
    told = session.run(
        "git", "remote", "get-url", "origin", external=True, silent=True, success_codes=[0, 2, 128]
    )
    address = str(told).strip().removesuffix(".git")
    return address if address.startswith("https://") else ""


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the site, and fail on any warning."""
    install_parts(session, *PACKAGES)
    session.install("mkdocs<2", "mkdocs-material", "mkdocstrings[python]", "ruff==0.17.5")
    env = {"NO_MKDOCS_2_WARNING": "1", "TORCHPARTS_REPOSITORY": repository_address(session)}
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
