"""What experiments and pages use and no core module does: published bounds, rules, texts, sketches.

No promise of stability: names and files here may change in any release. A guarantee of the package
never depends on this code, since nothing in the core imports it (``tests/test_imports.py``).
"""
