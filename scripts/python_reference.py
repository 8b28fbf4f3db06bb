#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/python.md, the reference of the Python package, from its sources: public names (__all__), signatures, docstrings. Imports nothing.

  scripts/python_reference.py [--check]      --check: compare instead
"""
import ast
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "bindings/python/waybill"
PAGE = ROOT / "docs/python.md"
MODULES = ("waybill", "waybill.torch", "waybill.jax", "waybill.jax.flax", "waybill.jax.nnx")
INTRO = """# Reference of the Python package

Written by scripts/python_reference.py from the docstrings of bindings/python; do not edit it. [howto/pytorch.md](howto/pytorch.md) and
[howto/jax.md](howto/jax.md) show the names at work; letters are those of the [glossary](glossary.md).
"""


def file_of(module):
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def public_names(tree):
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            return ast.literal_eval(node.value)
    return [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")]


def find(path, name):
    """The definition of a public name, through `from .x import name`, and its file; (None, None) where there is none."""
    for node in parsed(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node, path
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
            return node, path
        names = {alias.asname or alias.name: alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) and node.level else {}
        if name in names:
            source = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            return find(source / "__init__.py" if source.is_dir() else source.with_suffix(".py"), names[name])
    return None, None


def call(name, arguments, result=""):
    """name(arguments) and what follows; arguments in lines of their own where they are many."""
    line = f"{name}({', '.join(arguments)}){result}"
    if len(line) <= 120:
        return line
    rows = [""]
    for argument in arguments:
        if len(rows[-1]) + len(argument) > 110:
            rows.append("")
        rows[-1] += f"{argument}, "
    return f"{name}(\n" + "\n".join(f"    {row.rstrip()}" for row in rows).removesuffix(",") + f"\n){result}"


def split(text):
    """Arguments of a signature's text: commas outside of brackets part them."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def signature(node, name):
    arguments = [argument for argument in split(ast.unparse(node.args)) if argument != "self"]
    return call(name, arguments, f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else "")


def fields_of(node):
    """Fields of a dataclass or named tuple, as its arguments."""
    parts = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            value = item.value
            if isinstance(value, ast.Call):  # field(default=...)
                value = next((word.value for word in value.keywords if word.arg == "default"), None)
            parts.append(f"{item.target.id}: {ast.unparse(item.annotation)}{'' if value is None else ' = ' + ast.unparse(value)}")
    return parts


def escaped(line):
    """Stars outside of code would be read as emphasis."""
    return line if line.startswith("    ") else "`".join(part if i % 2 else part.replace("*", "\\*") for i, part in enumerate(line.split("`")))


def doc(node):
    text = (ast.get_docstring(node) or "").strip()
    return ["\n".join(map(escaped, text.splitlines())), ""] if text else []


def is_property(node):
    return any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list)


def described_class(node):
    init = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if init and init.args.args[1:2] and init.args.args[1].arg == "handle":  # made by functions of the package alone
        head = node.name
    else:
        head = signature(init, node.name) if init else call(node.name, fields_of(node))
    lines = ["```python", f"class {head}", "```", "", *doc(node), *(doc(init) if init else [])]
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name != "struct" and not item.name.startswith("_") and ast.get_docstring(item):
            shown = item.name if is_property(item) else " ".join(signature(item, item.name).split()).replace("( ", "(")
            lines += [f"* `.{shown}`: " + " ".join(doc(item)[0].split()), ""]
    return lines


def described(module, name):
    node, path = find(file_of(module), name)
    lines = [f"### {module}.{name}", ""]
    if module != MODULES[0] and path is not None and path.parent == PACKAGE:
        return [*lines, f"[waybill.{name}](#waybill{name.lower()})", ""]
    if isinstance(node, ast.ClassDef):
        return [*lines, *described_class(node)]
    if isinstance(node, ast.FunctionDef):
        return [*lines, "```python", signature(node, name), "```", "", *doc(node)]
    if isinstance(node, ast.Assign):
        return [*lines, f"`{ast.unparse(node)}`", ""]
    sys.exit(f"python_reference: {module}.{name} is public and not defined in the package")


def page():
    lines = [INTRO]
    for module in MODULES:
        tree = parsed(file_of(module))
        lines += [f"## {module}", "", *doc(tree)]
        for name in sorted((name for name in public_names(tree) if name != "__version__"), key=str.lower):
            lines += described(module, name)
    return "\n".join(lines).rstrip() + "\n"


def main():
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print("docs/python.md does not match the docstrings: run scripts/python_reference.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
