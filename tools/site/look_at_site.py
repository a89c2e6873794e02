"""Open every page of the built site in a headless browser, and print what is wrong.

Usage: python tools/site/look_at_site.py SITE_FOLDER, or --probe to check for a browser.

For each page, light and dark, 400 pixels wide: nothing is cut off, nothing is loaded from another
server, no script fails, axe finds no serious fault, images load and their labels are legible, and
pages in the navigation have previous and next links, and the search finds words of each page.

Without a browser it prints "not run" and fails. TORCHPARTS_BROWSER names a browser that playwright
did not install, and TORCHPARTS_BROWSER_OPTIONS its options.
"""

from __future__ import annotations

import functools
import http.server
import itertools
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTH = 400
LEAST_PX = 8.5  # height of a chart label; the page's text has 16
PATIENCE_MS = 120_000  # for machines under load
WORDS = {
    "llama": "examples.html",
    "OOM": "out-of-memory.html",  # this and the next are tags
    "HF": "one-gpu.html",
    "bf16": "many-gpus.html",
    "ZeRO-3": "many-gpus.html",
    "H100": "find-modules.html",
    "offload": "ckpt-wrap/manual.html",
    "gradient checkpointing": "one-gpu.html",
    "gradient_checkpointing": "one-gpu.html",
    "deepspeed": "migrate.html",
    "resume": "many-gpus.html",
    # a whole error message, as users paste it, finds its explanation among the first three
    "Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.half": "#must-flat",
    "but all ranks must run the same units in the same order. Look for": "#but-all-ranks-must-run",
    "loaded state dict contains a parameter group that doesn't match": "#loaded-state-dict",
    # dashes and slashes of a path are not search syntax
    "sac_policies.save_ops: operator 'aten.mmm' is not registered (at /home/me/my-model/train.py:9 "
    "in <lambda>), but an entry without wildcards names one operator": "#is-not-registered-at",
}
# Elements that scroll or clip hold their contents, so the search stops there. A box in a closed
# `details` is laid out only when opened, one at a time, and a table may have thousands.
CUT = """() => {
  const width = document.documentElement.clientWidth, cut = [];
  const scrolls = (node) => /auto|scroll|hidden|clip/.test(getComputedStyle(node).overflowX);
  const look = (node) => {
    const box = node.getBoundingClientRect();
    if (box.width && box.right > width + 1) cut.push(node.outerHTML.slice(0, 80));
    if (!scrolls(node)) [...node.children].forEach(look);
  };
  document.querySelectorAll("header, main, footer").forEach(look);
  if (document.documentElement.scrollWidth > width) cut.push("the page scrolls sideways");
  return cut.slice(0, 3);
}"""
LACKS = """() => [
  ...[...document.images].filter((i) => !i.complete || !i.naturalWidth).map((i) => i.src),
  ...(document.querySelector("main") ? [] : ["no main"]),
  ...(document.querySelector(".md-footer__link") || /(404|notes.*)\\.html/.test(location.pathname)
      ? [] : ["no previous and no next page"]),
]"""
# Labels of a chart in pixels on screen. An image has no DOM, so its SVG source is measured.
LABELS = """(least) => Promise.all([...document.images].filter((i) => i.src.endsWith(".svg")).map(
  async (image) => {
    const written = await (await fetch(image.src)).text();
    const drawing = new DOMParser().parseFromString(written, "image/svg+xml").documentElement;
    const shown = document.body.appendChild(document.importNode(drawing, true));
    const width = shown.viewBox.baseVal?.width || shown.width.baseVal.value;
    const scale = image.getBoundingClientRect().width / width;
    const wrong = [...shown.querySelectorAll("text")].flatMap((label) => {
      const box = label.getBBox(), high = parseFloat(getComputedStyle(label).fontSize) * scale;
      return box.x < 0 || box.x + box.width > width ? [`is cut off: ${label.textContent}`]
        : high < least ? [`is ${high.toFixed(1)} pixels high: ${label.textContent}`] : [];
    });
    shown.remove();
    return wrong.slice(0, 2).map((fault) => `${image.src}: a label ${fault}`);
  })).then((found) => found.flat())"""
# Only two rules depend on colours; the others give the same result in light and dark. The style
# sheets are the site's own, so axe need not fetch them again.
AXE = """(rules) => axe.run(document, {
    resultTypes: ["violations"], preload: false, ...(rules.length ? {runOnly: rules} : {}),
  }).then((found) => found.violations
  .filter((rule) => ["serious", "critical"].includes(rule.impact))
  .map((rule) => `${rule.id}: ${rule.nodes.length} x ${rule.nodes[0].html.slice(0, 90)}: ` +
    (rule.nodes[0].any[0]?.message ?? "")))"""
COLOURS = ["color-contrast", "link-in-text-block"]
IN_DARK = "() => document.body.dataset.mdColorScheme === 'slate'"
# Whether one of the first links contains a text; or, for none, that there is no link.
SHOWN = """([wanted, first]) => {
  const links = [...document.querySelectorAll('.md-search-result__link')].map((a) => a.href);
  return first ? links.slice(0, first).some((link) => link.includes(wanted)) : !links.length;
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server without a log line for each file."""

    def log_message(self, *rest: object) -> None:
        """Do nothing."""


def serve(site: Path) -> str:
    """Serve a folder on localhost and return its address."""
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"


def browser_of(player: Any) -> Any:
    """Return a browser: the named one, playwright's own, or a system one; None without any."""
    named = os.environ.get("TORCHPARTS_BROWSER")
    options = shlex.split(os.environ.get("TORCHPARTS_BROWSER_OPTIONS", ""))
    if named:
        return player.chromium.launch(executable_path=named, args=options)
    if Path(player.chromium.executable_path).exists():
        return player.chromium.launch(args=options)
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    return player.chromium.launch(executable_path=found, args=options) if found else None


def wrong_pages(browser: Any, site: Path, address: str, axe: str) -> Iterator[str]:
    """Yield what is wrong with each page, in light, and for rules about colours also in dark."""
    page = browser.new_context(viewport={"width": WIDTH, "height": 800}).new_page()
    page.set_default_timeout(PATIENCE_MS)
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(f"a script failed: {error}"))
    page.on("request", lambda asked: said.extend(foreign(asked.url, address)))
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        page.emulate_media(color_scheme="light")
        page.goto(address + name)
        said += [f"cut off: {cut}" for cut in page.evaluate(CUT)]
        said += page.evaluate(LACKS)
        said += page.evaluate(LABELS, LEAST_PX)
        page.evaluate(axe)
        said += page.evaluate(AXE, [])
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(IN_DARK)
        said += [f"in dark: {line}" for line in page.evaluate(AXE, COLOURS)]
        yield from (f"{name}: {line}" for line in said)
        said.clear()


def foreign(url: str, address: str) -> list[str]:
    """Return a complaint if a request leaves this machine."""
    own = url.startswith((address, "data:", "blob:"))
    return [] if own else [f"asks {url}"]


def lost_words(browser: Any, start: str) -> Iterator[str]:
    """Yield search words that do not find their page."""
    page = browser.new_context(viewport={"width": WIDTH, "height": 800}).new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(start)
    page.locator("label.md-header__button[for=__search]").first.click()
    box = page.locator("input.md-search__input")
    for word, wanted in WORDS.items():
        for said, shown in (("", ["", 0]), (word, [wanted, 3 if " " in word else 1000])):
            box.fill(said)
            box.press("End")  # the theme searches on key release
            try:
                page.wait_for_function(SHOWN, arg=shown)
            except Exception:
                yield f"{start}: the search for {word!r} does not show {wanted}"
    page.close()


def look(browser: Any, site: Path, axe: str) -> int:
    """Check everything, print each fault, and return their number."""
    address, wrong = serve(site), 0
    searched = lost_words(browser, f"{address}index.html")
    for line in itertools.chain(searched, wrong_pages(browser, site, address, axe)):
        print(line, flush=True)
        wrong += 1
    print(f"{len(list(site.rglob('*.html')))} pages, in light and dark; {wrong} faults")
    return wrong


def main(given: str) -> int:
    """Check the site, or only whether a browser exists; return the exit code."""
    probing = given == "--probe"
    try:
        import axe_playwright_python
        from playwright.sync_api import sync_playwright
    except ImportError as missing:
        print(f"not run: {missing}")
        return int(not probing)
    axe = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    with sync_playwright() as player:
        browser = browser_of(player)
        if browser is None:
            print("not run: no browser; `playwright install chromium`, or set TORCHPARTS_BROWSER")
            return int(not probing)
        wrong = 0 if probing else look(browser, Path(given), axe)
        browser.close()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
