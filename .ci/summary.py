"""Print run and skipped tests per suite from a JUnit report; fail on a skip that is not allowed."""

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

report, allowed_file = sys.argv[1:]
allowed = {line.split("#")[0].strip() for line in Path(allowed_file).read_text().splitlines()} - {""}
total: Counter[str] = Counter()
skipped: Counter[str] = Counter()
failed: Counter[str] = Counter()
surprises = []
for case in ET.parse(report).iter("testcase"):
    name = f"{case.get('classname')}::{case.get('name')}"
    suite = ".".join((case.get("classname") or "").split(".")[:2])
    total[suite] += 1
    if case.find("skipped") is not None:
        skipped[suite] += 1
        if name not in allowed:
            surprises.append(name)
    if case.find("failure") is not None or case.find("error") is not None:
        failed[suite] += 1
for suite in sorted(total):
    print(f"{suite:24} run {total[suite] - skipped[suite]:4}  skipped {skipped[suite]:3}  failed {failed[suite]:3}")
if surprises:
    print("skipped without being in .ci/allowed-skips:", *surprises, sep="\n  ")
passed = sum(total.values()) - sum(skipped.values()) - sum(failed.values())
print(f"{passed} passed, {sum(failed.values())} failed, {sum(skipped.values())} skipped")
sys.exit(bool(surprises) or not passed)
