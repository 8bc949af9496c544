"""Draws the diagrams of this folder: every `NAME.mmd` becomes `NAME.svg`.

    npm pack mermaid@11 && tar xzf mermaid-*.tgz package/dist/mermaid.min.js
    python docs/figures/render.py package/dist/mermaid.min.js

The pictures are committed, so that the docs show them on GitHub and without a network. Needs Chromium.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PAGE = """<body><script src="{script}"></script><script>
mermaid.initialize({{startOnLoad: false, htmlLabels: false, theme: "neutral", fontFamily: "sans-serif",
  flowchart: {{htmlLabels: false, wrappingWidth: 420, rankSpacing: 28, nodeSpacing: 24, padding: 10}}}});
(async () => {{
  for (const [name, source] of Object.entries({sources})) {{
    const drawn = document.createElement("pre");
    drawn.textContent = (await mermaid.render("figure-" + name, source)).svg;
    document.body.append(drawn);
  }}
}})();
</script></body>"""


def main(script: Path) -> None:
    """Draws all diagrams with one start of the browser."""
    sources = {path.stem: path.read_text("utf-8") for path in sorted(HERE.glob("*.mmd"))}
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(
            PAGE.format(script=script.resolve().as_uri(), sources=json.dumps(sources)), "utf-8"
        )
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
        command = ["chromium", *flags, "--virtual-time-budget=20000", "--dump-dom", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    drawn = [html.unescape(text) for text in re.findall(r"<pre>(.*?)</pre>", done.stdout, re.S)]
    for name, svg in zip(sources, drawn, strict=True):
        (HERE / f"{name}.svg").write_text(framed(svg) + "\n", "utf-8")


def framed(svg: str) -> str:
    """The drawing at its own size on white, which dark pages need."""
    found = re.search(r'viewBox="[-\d.]+ [-\d.]+ ([\d.]+) ([\d.]+)"', svg)
    assert found is not None
    width, height = (float(number) * 0.8 for number in found.groups())
    svg = svg.replace('width="100%"', f'width="{width:.0f}" height="{height:.0f}"', 1)
    return re.sub(r'style="max-width: [\d.]+px;"', 'style="background: #fff"', svg, count=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
