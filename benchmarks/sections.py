"""A script writes its part of a page between two comments; the rest of the page is by hand."""

import pathlib


def fill(page: pathlib.Path, script: str, text: str) -> None:
    """Puts the text between the comments of a script.

    Raises:
        ValueError: if the page lacks `<!-- SCRIPT -->` or `<!-- end of SCRIPT -->`.
    """
    start, end = f"<!-- {script} -->\n", f"<!-- end of {script} -->"
    before, found, rest = page.read_text("utf-8").partition(start)
    _, ends, after = rest.partition(end)
    if not (found and ends):
        raise ValueError(f"{page}: expected {start.strip()} before {end}, to write between them.")
    page.write_text(f"{before}{start}\n{text.strip()}\n\n{end}{after}", "utf-8")
