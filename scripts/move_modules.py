"""Moves and merges modules by a table, and follows their names: `python scripts/move_modules.py TABLE`.

The table is JSON, with paths relative to the repository:

    {"move": {"offload/a/old.py": "offload/b/new.py"},
     "merge": {"offload/a/part.py": "offload/b/new.py"},
     "rename": {"offload/a/part.py::choose": "choose_part"}}

A target consists of the module that is there, or moves there, and then of the merged ones, in the order in which they
import each other. Imports, module objects, dotted names in strings, paths in documents, mutants and points of tests
follow. `--only offload/swapper` takes the rows of one folder. `--check` writes nothing.

What the script cannot decide is printed: names that two members of a target define, or that one imports and another one
defines. A row of "rename" settles it. Afterwards `make format`, and what ruff and mypy still find, by hand.

This script serves the moves of the house, and goes with the last of them.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import textwrap
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("offload", "tests", "bench", "scripts", "examples", "docs")
DOCUMENTS = (".md", ".toml", ".yml", ".txt", ".h", ".cpp", ".cu", ".pyi")


def dotted(path: str) -> str:
    """Returns the name by which Python imports the module at a path."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def stem(path: str) -> str:
    return Path(path).stem if Path(path).stem != "__init__" else Path(path).parent.name


def is_type_checking(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


class Source:
    """A parsed file, with the byte offsets of its nodes."""

    def __init__(self, path: str) -> None:
        self.path, self.text = path, (ROOT / path).read_text("utf-8")
        self.tree, self.bytes = ast.parse(self.text), self.text.encode()
        self.lines = self.text.splitlines(keepends=True)
        self._offsets = [0]
        for line in self.lines:
            self._offsets.append(self._offsets[-1] + len(line.encode()))
        self.top_names = self._top_names()
        self.imports = self._import_bindings(self.tree.body)
        self.needed = self._import_bindings([s for s in self.tree.body if not is_type_checking(s)])

    def offset(self, line: int, column: int) -> int:
        return self._offsets[line - 1] + column

    def span(self, node: Any) -> tuple[int, int]:
        """Returns the bytes of a node, decorators excluded."""
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def _top_names(self) -> dict[str, ast.stmt]:
        names: dict[str, ast.stmt] = {}
        for statement in self.tree.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names[statement.name] = statement
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                names |= {n.id: statement for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            elif isinstance(statement, ast.If) and not is_type_checking(statement):
                inner = [*statement.body, *statement.orelse]
                names |= {n.name: statement for n in inner if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        return names

    @staticmethod
    def _import_bindings(statements: list[ast.stmt]) -> dict[str, str]:
        """Returns what each name that statements import is: "module:name" or "module"."""
        bound: dict[str, str] = {}
        for statement in statements:
            for node in statement.body if isinstance(statement, ast.If) else [statement]:
                if isinstance(node, ast.ImportFrom):
                    bound |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
                elif isinstance(node, ast.Import):
                    for alias in node.names:
                        first = alias.name.split(".")[0]
                        bound[alias.asname or first] = alias.name if alias.asname else first
        return bound


class Moves:
    """One run of the script."""

    def __init__(self, table: dict[str, dict[str, str]], only: list[str]) -> None:
        rows = {**table["move"], **table["merge"]}
        if only:
            rows = {
                old: new for old, new in rows.items() if any(path.startswith(f) for f in only for path in (old, new))
            }
        rows = {old: new for old, new in rows.items() if (ROOT / old).exists()}
        self.problems: list[str] = []
        paths = [p.relative_to(ROOT).as_posix() for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]
        self.sources = {path: Source(path) for path in paths if "__pycache__" not in path}
        self.modules = {dotted(path): path for path in self.sources}
        # The module that gives a target its essay stands first.
        self.targets: dict[str, list[str]] = defaultdict(list)
        for old, new in rows.items():
            if old in table["move"]:
                self.targets[new].append(old)
        for new in {*rows.values()}:
            if new in self.sources and new not in rows and new not in self.targets[new]:
                self.targets[new].insert(0, new)
        for old, new in rows.items():
            if old in table["merge"] and old not in table["move"]:
                self.targets[new].append(old)
        self.targets = dict(self.targets)
        self.rows = {old: new for old, new in rows.items() if old != new}
        self.targets = {target: members for target, members in self.targets.items() if members != [target]}
        self.new_of = {member: target for target, members in self.targets.items() for member in members}
        self.rename: dict[str, dict[str, str]] = defaultdict(dict)
        for place, name in table.get("rename", {}).items():
            path, _, old_name = place.partition("::")
            if path in self.new_of:
                self.rename[path][old_name] = name
        self.vanished = {dotted(path) for path in self.sources if self._vanishes(path)}
        self.reexported = self._reexports()
        for target, members in self.targets.items():
            self._check(target, members)

    def _vanishes(self, path: str) -> bool:
        """Returns True for the `__init__` of a package all of whose modules move away."""
        folder = path.removesuffix("__init__.py")
        if not path.startswith("offload/") or path == folder or not any(old.startswith(folder) for old in self.rows):
            return False
        inside = [p for p in self.sources if p.startswith(folder) and not p.endswith("/__init__.py")]
        return all(p in self.new_of and not self.new_of[p].startswith(folder) for p in inside)

    def _reexports(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Returns where the names come from that the `__init__` of a package imports."""
        names = {}
        for path, source in self.sources.items():
            if path.endswith("/__init__.py") and path.startswith("offload/"):
                for name, what in source.imports.items():
                    module, _, original = what.partition(":")
                    if original and module.startswith("offload") and f"{module}.{original}" not in self.modules:
                        names[dotted(path), name] = (module, original)
        return names

    def _check(self, target: str, members: list[str]) -> None:
        """Notes the names that two members of a target bind to different things; private ones are renamed."""
        owner: dict[str, tuple[str, str]] = {}
        for member in members:
            for name, statement in self.sources[member].top_names.items():
                text = ast.unparse(statement)
                if name in owner and owner[name][1] != text and name not in self.rename[member]:
                    if name.startswith("_"):
                        self.rename[member][name] = f"_{stem(member)}{name}"
                    else:
                        self.problems.append(f"{target}: {name} in {owner[name][0]} and {member}")
                owner.setdefault(name, (member, text))
        imported: dict[str, tuple[str, str]] = {}
        for member in members:
            for name, what in self.sources[member].imports.items():
                module, _, original = what.partition(":")
                inner = self.modules.get(module) in members or self.modules.get(f"{module}.{original}") in members
                if name in self.rename[member] or inner:
                    continue
                if name in owner and owner[name][0] != member and name not in self.rename[owner[name][0]]:
                    self.problems.append(f"{target}: {member} imports {name} ({what}), {owner[name][0]} defines it")
                if imported.setdefault(name, (member, what))[1] != what:
                    self.problems.append(f"{target}: {name} is {imported[name][1]}, and {what} in {member}")

    def final(self, module: str, name: str) -> tuple[str, str] | None:
        """Returns (module, name) for `from module import name`, ("module", its new name), or None for no change."""
        if module in self.vanished and (module, name) in self.reexported:
            module, name = self.reexported[module, name]
            return self.final(module, name) or (module, name)
        if path := self.modules.get(f"{module}.{name}"):
            return ("module", dotted(self.new_of[path])) if path in self.new_of else None
        path = self.modules.get(module, "")
        return (dotted(self.new_of[path]), self.rename[path].get(name, name)) if path in self.new_of else None

    def rewritten(self, path: str, target: str | None = None) -> str:
        """Returns the text of a file whose imports, module objects and own names are the new ones.

        Args:
            path: The file.
            target: Where it goes, if it moves: what is imported from there is at hand.
        """
        source, own = self.sources[path], self.rename.get(path, {})
        nodes = list(ast.walk(source.tree))
        stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        stored |= {n.arg for n in nodes if isinstance(n, ast.arg)}
        bound = stored | {n.id for n in nodes if isinstance(n, ast.Name)} | {*source.top_names}
        bound |= {a.asname or a.name for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}
        top = [n for s in source.tree.body for n in (s.body if isinstance(s, ast.If) else [s])]
        edits: set[tuple[int, int, str]] = set()
        here: dict[str, str] = {}  # module objects whose names are at hand
        objects: dict[str, tuple[str, str]] = {}  # module objects by their new name, and the path of before
        leaves: dict[str, str] = {}
        names: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if (old := self.modules.get(alias.name)) in self.new_of and alias.name.startswith("offload."):
                        tail = f" as {alias.asname}" if alias.asname else ""
                        edits.add((*source.span(alias), dotted(self.new_of[old]) + tail))
            if not (isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("offload")):
                continue
            groups: dict[str, list[str]] = defaultdict(list)
            changed = False
            for alias in node.names:
                own_alias = own.get(alias.asname or alias.name) if node in top else None
                new = self.final(node.module, alias.name)
                if new is None:
                    as_name = own_alias or alias.asname
                    groups[node.module].append(alias.name + (f" as {as_name}" if as_name else ""))
                    changed |= own_alias is not None
                    continue
                changed = True
                module, name = new
                if module == "module":
                    shown, old = alias.asname or alias.name, self.modules[f"{node.module}.{alias.name}"]
                    if target and name == dotted(target):
                        here[shown] = old
                        continue
                    package, _, leaf = name.rpartition(".")
                    if leaf != shown and (leaf not in bound or leaves.get(leaf) == name) and not own_alias:
                        leaves[leaf], objects[shown] = name, (leaf, old)
                        shown = leaf
                    else:
                        objects[shown] = (shown, old)
                    groups[package].append(leaf + (f" as {shown}" if shown != leaf else ""))
                elif target and module == dotted(target):
                    if (shown := own_alias or alias.asname or alias.name) != name:
                        names[shown] = name
                else:
                    as_name = own_alias or alias.asname
                    if as_name is None and name != alias.name:
                        if name in bound:
                            as_name = alias.name
                        else:
                            names[alias.name] = name
                    groups[module].append(name + (f" as {as_name}" if as_name and as_name != name else ""))
            if changed:
                lines = [f"from {m} import {', '.join(dict.fromkeys(taken))}" for m, taken in groups.items()]
                empty = "pass" if node.col_offset else ""
                edits.add((*source.span(node), ("\n" + " " * node.col_offset).join(lines) or empty))
        for node in nodes:
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                if text.startswith("offload.") and (old := self.modules.get(text)) in self.new_of:
                    edits.add((*source.span(node), dotted(self.new_of[old])))
                elif isinstance(node.value, ast.Name) and self._has(objects.get(node.value.id, ("", ""))[1], node.attr):
                    leaf, old = objects[node.value.id]
                    edits.add((*source.span(node), f"{leaf}.{self.rename[old].get(node.attr, node.attr)}"))
                elif isinstance(node.value, ast.Name) and self._has(here.get(node.value.id, ""), node.attr):
                    name = self.rename[here[node.value.id]].get(node.attr, node.attr)
                    if name in stored:
                        self.problems.append(f"{path}:{node.lineno}: {text} becomes {name}, which the file binds")
                    edits.add((*source.span(node), name))
            elif isinstance(node, ast.Name) and node.id not in stored | {*own}:
                new_name = objects[node.id][0] if node.id in objects else names.get(node.id, node.id)
                if new_name != node.id:
                    edits.add((*source.span(node), new_name))
            if isinstance(node, ast.Name) and node.id in own:
                edits.add((*source.span(node), own[node.id]))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in own and node in source.tree.body:
                line = source.lines[node.lineno - 1]
                start = source.offset(node.lineno, len(line[: line.index(node.name, node.col_offset)].encode()))
                edits.add((start, start + len(node.name.encode()), own[node.name]))
        data, done = source.bytes, list[tuple[int, int]]()
        for start, stop, text in sorted(edits, key=lambda edit: (-edit[0], -edit[1])):
            if not any(start < other_stop and other_start < stop for other_start, other_stop in done):
                done.append((start, stop))
                data = data[:start] + text.encode() + data[stop:]
        return data.decode()

    def _has(self, path: str, name: str) -> bool:
        """Returns True if a module binds a name: a variable of the same name as the module has other attributes."""
        return path in self.sources and name in self.sources[path].top_names | self.sources[path].imports

    def ordered(self, members: list[str]) -> list[str]:
        """Returns the members of a target in the order in which they need each other when they are imported."""
        needs: dict[str, set[str]] = {member: set() for member in members}
        for member in members:
            for what in self.sources[member].needed.values():
                module, _, name = what.partition(":")
                places = (module, f"{module}.{name}", self.reexported.get((module, name), ("",))[0])
                needs[member] |= {self.modules[p] for p in places if self.modules.get(p) in needs} - {member}
        order: list[str] = []

        def visit(member: str, above: tuple[str, ...] = ()) -> None:
            if member in above:
                self.problems.append(f"a circle: {' > '.join((*above, member))}")
            elif member not in order:
                for other in sorted(needs[member], key=members.index):
                    visit(other, (*above, member))
                order.append(member)

        for member in members:
            visit(member)
        return order

    def merged(self, target: str, members: list[str]) -> str:
        """Returns the text of a target: one docstring, one block of imports, then a section for each member."""
        essay, imports, checked, bodies, seen = "", list[str](), list[str](), list[str](), set[str]()
        order = self.ordered(members)
        for member in order:
            doc, imported, checking, pieces, rest = parts_of(self.rewritten(member, target))
            imports, checked = imports + imported, checked + checking
            # The same constant, such as a logger, stands in several members.
            fresh = [piece for piece in pieces if piece.strip().startswith('"""') or piece.strip() not in seen]
            seen |= {piece.strip() for piece in pieces}
            body = "".join(fresh) + rest
            if member == members[0]:
                essay = doc
            if len(order) > 1:
                note = "" if member == members[0] or not doc else "#\n" + as_comment(doc)
                title = stem(member).replace("_", " ")
                body = f"\n\n# -- {title} {'-' * (98 - len(title))}\n{note}\n\n" + body.strip("\n") + "\n"
            bodies.append(body)
        runtime = "\n".join(dict.fromkeys(line for line in imports if line.strip()))
        checked = [line for line in dict.fromkeys(checked) if line != "pass"]
        if checked:
            runtime += "" if re.search(r"import .*\bTYPE_CHECKING\b", runtime) else "\nfrom typing import TYPE_CHECKING"
            runtime += "\n\nif TYPE_CHECKING:\n" + textwrap.indent("\n".join(checked), "    ")
        return f'"""{essay}"""\n\nfrom __future__ import annotations\n\n{runtime}\n' + "".join(bodies)

    def named(self, text: str) -> str:
        """Returns a text in which dotted names and paths of modules are the new ones."""
        dots = {dotted(old): dotted(new) for old, new in self.rows.items()}
        paths = {old.removeprefix("offload/"): new.removeprefix("offload/") for old, new in self.rows.items()}
        for table, before in ((dots, r"(?<![\w.])"), (paths, r"(?<![\w])(?<![\w]/)")):
            longest_first = sorted(table, key=len, reverse=True)
            if longest_first:
                pattern = f"{before}((?:offload/)?)({'|'.join(map(re.escape, longest_first))})(?![\\w])"
                text = re.sub(pattern, partial(_replaced, table), text)
        return text

    def results(self) -> tuple[dict[str, str], set[str]]:
        """Returns the new texts by path, and the files that go."""
        texts = {target: self.merged(target, members) for target, members in self.targets.items()}
        gone = {member for target, members in self.targets.items() for member in members if member != target}
        gone |= {f"{package.replace('.', '/')}/__init__.py" for package in self.vanished}
        for path in self.sources:
            if path not in self.new_of and path not in gone:
                texts[path] = self.rewritten(path)
        documents = [p for p in ROOT.rglob("*") if p.suffix in DOCUMENTS and p.is_file()]
        documents += [ROOT / "Makefile", ROOT / "CMakeLists.txt", ROOT / ".ci/run"]
        for document in documents:
            relative = document.relative_to(ROOT)
            if not {".venv", ".git", "build", "site"} & {*relative.parts}:
                texts[relative.as_posix()] = document.read_text("utf-8")
        texts = {path: self.named(text) for path, text in texts.items()}
        for target in self.targets:
            for folder in Path(target).parents:
                package = (folder / "__init__.py").as_posix()
                if folder.parts[:1] == ("offload",) and package not in texts and f"{folder}.py" not in texts:
                    gone.discard(package)
                    texts[package] = (
                        self.sources[package].text if package in self.sources else f'"""{folder.name}."""\n'
                    )
        return {p: t for p, t in texts.items() if not (ROOT / p).exists() or (ROOT / p).read_text("utf-8") != t}, gone


def _replaced(table: dict[str, str], match: re.Match[str]) -> str:
    return match[1] + table[match[2]]


def parts_of(text: str) -> tuple[str, list[str], list[str], list[str], str]:
    """Returns docstring, imports, imports for types, other statements with the comments above them, and the rest."""
    source = ast.parse(text)
    data, offsets = text.encode(), [0]
    for line in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line.encode()))
    doc, body, cursor = ast.get_docstring(source, clean=False) or "", list(source.body), 0
    if doc:
        first: Any = body.pop(0)
        cursor = offsets[first.end_lineno - 1] + first.end_col_offset
    imports, checking, pieces = list[str](), list[str](), list[str]()
    for statement in body:
        node: Any = statement
        decorators = getattr(node, "decorator_list", None)
        start = offsets[(decorators[0] if decorators else node).lineno - 1] + node.col_offset
        stop = offsets[node.end_lineno - 1] + node.end_col_offset
        stop = stop if (end := data.find(b"\n", stop)) < 0 else end  # a comment behind the statement is its own
        above, own = data[cursor:start].decode(), data[start:stop].decode()
        if isinstance(node, ast.Import | ast.ImportFrom):
            if getattr(node, "module", "") != "__future__":
                imports.append("\n".join(filter(None, (above.strip(), own))))
        elif is_type_checking(node):
            checking += [ast.unparse(line) for line in node.body]
        else:
            pieces.append(above + own)
        cursor = stop
    return doc, imports, checking, pieces, data[cursor:].decode()


def as_comment(doc: str) -> str:
    """Returns a docstring as lines of a comment; a paragraph that would be too wide is broken anew."""
    lines, paragraph = list[str](), list[str]()
    for line in [*doc.strip().splitlines(), ""]:
        if line.strip() and not line.startswith((" ", "*", "-", "|", "[")):
            paragraph.append(line)
            continue
        wide = any(len(part) > 118 for part in paragraph)
        lines += textwrap.wrap(" ".join(paragraph), 118, break_on_hyphens=False) if wide else paragraph
        lines.append(line)
        paragraph = []
    return "".join(f"# {line}".rstrip() + "\n" for line in lines[:-1])


def main() -> None:
    """Reads the table, and writes what follows from it."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("table", type=Path)
    options.add_argument("--only", action="append", default=[], metavar="FOLDER")
    options.add_argument("--check", action="store_true")
    given = options.parse_args()
    moves = Moves(json.loads(given.table.read_text("utf-8")), given.only)
    texts, gone = moves.results()
    for problem in sorted({*moves.problems}):
        print(problem)
    print(f"{len(moves.targets)} targets, {len(gone)} files gone, {len(texts)} written")
    if given.check:
        return
    for path in gone:
        (ROOT / path).unlink()
    for path, text in texts.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
