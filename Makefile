.PHONY: install test thorough lint types imports ci demo docs clean

install:
	pip install -c constraints.txt -e ".[dev]"

test:
	pytest

thorough:
	pytest -m thorough -o faulthandler_timeout=3600

lint:
	ruff check && ruff format --check

types:
	mypy

imports:
	lint-imports

ci:
	.ci/run

docs:
	pip install -c constraints.txt -e ".[docs]" && mkdocs build --strict

demo:
	dshard demo

clean:
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache && find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
