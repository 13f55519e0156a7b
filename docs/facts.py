"""Lists what the text of another commit says and today's text does not.

    python docs/facts.py COMMIT                       # all pages and public docstrings
    python docs/facts.py COMMIT docs/transforms.md    # some of them
    python docs/facts.py COMMIT --marks=FILE          # leaves out what FILE explains

A fact is a number, a name, a default, a flag, a command, or an error's text: each number in prose
or in a table, each span of code, each line of an example. One that its page lacks and another page
has is printed with that page. A line of FILE is `page <tab> fact <tab> reason`; `*` stands for all
facts of a page.
"""

import argparse
import ast
import collections
import fnmatch
import io
import pathlib
import re
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("docs", "fnet", "README.md", "CONTRIBUTING.md")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
SPAN = re.compile(r"`+([^`]+?)`+")
FENCE = re.compile(r"^([ \t]*)(```|~~~).*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)


def pages(files: dict[str, str]) -> dict[str, str]:
    """The text of each page and of each public docstring, by its address."""
    texts = {}
    for name, text in files.items():
        if name.endswith(".md"):
            texts[name] = text
        elif name.endswith(".py") and name.startswith("fnet/"):
            texts.update(docstrings(name, text))
    return texts


def docstrings(name: str, source: str) -> dict[str, str]:
    found = {}

    def visit(node: ast.AST, address: str) -> None:
        for child in getattr(node, "body", []):
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if child.name.startswith("_"):
                continue
            inside = f"{address}{'.' if ':' in address else ':'}{child.name}"
            text = ast.get_docstring(child)
            if text:
                found[inside] = text
            if isinstance(child, ast.ClassDef):
                visit(child, inside)

    module = ast.parse(source)
    if ast.get_docstring(module):
        found[name] = ast.get_docstring(module)
    visit(module, name)
    return found


def facts(text: str) -> collections.Counter[str]:
    """The facts of a text, each once for each time that it stands there."""
    examples = [match.group(0) for match in FENCE.finditer(text)]
    prose = FENCE.sub("", text)
    found: list[str] = []
    for example in examples:
        lines = example.splitlines()[1:-1]
        code = (re.sub(r"\s+#\s.*", "", line).strip() for line in lines)
        found += [line for line in code if line]
    prose = re.sub(r"\]\([^)]*\)", "]", prose)  # addresses of links are checked by check_links.py
    for span in SPAN.findall(prose):
        found.append(" ".join(span.split()))
    found += [number.rstrip(",") for number in NUMBER.findall(SPAN.sub(" ", prose))]
    return collections.Counter(found)


def committed(commit: str) -> dict[str, str]:
    command = ["git", "archive", commit, *FOLDERS]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith((".md", ".py")):
                files[member.name] = tar.extractfile(member).read().decode()  # type: ignore
    return files


def today() -> dict[str, str]:
    command = ["git", "ls-files", "-co", "--exclude-standard", *FOLDERS]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [path for path in listed.splitlines() if path.endswith((".md", ".py"))]
    return {path: (ROOT / path).read_text() for path in paths if (ROOT / path).exists()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("pages", nargs="*", help="addresses, or patterns of them")
    parser.add_argument("--marks", help="a file of pages, facts and reasons, separated by tabs")
    options = parser.parse_args()
    before, after = pages(committed(options.commit)), pages(today())
    marked = set()
    if options.marks:
        for line in pathlib.Path(options.marks).read_text().splitlines():
            marked.add(tuple(line.split("\t")[:2]))
    where = collections.defaultdict(list)  # fact: the pages that say it today
    for page, text in after.items():
        for fact in facts(text):
            where[fact].append(page)
    lacking = 0
    for page, text in before.items():
        if options.pages and not any(fnmatch.fnmatch(page, each) for each in options.pages):
            continue
        kept = facts(after.get(page, ""))
        for fact in facts(text):
            if fact in kept or (page, fact) in marked or (page, "*") in marked:
                continue
            said = ", ".join(where[fact][:2])
            lacking += not said
            print(page, fact, f"said in {said}" if said else "", sep="\t")
    print(f"{lacking} facts are said nowhere", file=sys.stderr)
    return lacking > 0


if __name__ == "__main__":
    sys.exit(main())
