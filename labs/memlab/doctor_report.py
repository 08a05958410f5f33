"""A diagnosis as text for a terminal."""

from memlab.findings import Diagnosis, change, without_failure
from memlab.units import show_gib
from memlab.vllm_log import clean


def report(found: Diagnosis) -> str:
    """A diagnosis as text for a terminal, free of control characters."""
    lines = []
    if not found.failures:
        said = without_failure(found.phase, found.enough, found.ledger is not None)
        lines.append(f"Undetermined: {said}." if found.phase == "undetermined" else _sentence(said))
    if found.starts > 1:
        lines.append(f"{found.starts} starts of a server; a failure that comes again stands once.")
    for number, one in enumerate(found.failures, 1):
        lines += ["", f"{number}. {one.phase} ({one.confidence} confidence)", f"   {_sentence(one.cause)}"]
        if one.missing_gib is not None:
            lines.append(f"   Missing: {show_gib(one.missing_gib)}")
        lines += [f"   {note}" for note in one.notes]
        lines += [f"   line {line.line}: {clean(line.text, 160)}" for line in one.evidence[:3]]
        if one.fixes:
            lines.append("   What helps:")
        for fix in one.fixes:
            gain = "" if fix.gains_gib is None else f" [{show_gib(fix.gains_gib, signed=True)}]"
            to = change(fix.flag, fix.from_, fix.to)
            lines.append(f"   - {fix.flag}: {to}{gain}. {_sentence(fix.why)} Costs: {fix.costs}.")
        if one.will_not_help:
            lines.append("   What cannot help:")
        lines += [f"   - {flag}: {_sentence(why)}" for flag, why in one.will_not_help]
    ledger = found.ledger.known() if found.ledger else {}
    if ledger:
        lines += ["", "Ledger: " + ", ".join(f"{name} {show_gib(size)}" for name, size in ledger.items())]
    if found.weak_spot:
        lines.append(f"Weak spot: {_sentence(found.weak_spot)}")
    lines += [f"Harmless, line {line.line}: {clean(line.text, 100)} ({why})" for line, why in found.harmless]
    if found.paste_also:
        lines += ["", "Paste also:"] + [f"- {what}" for what in found.paste_also]
    return "\n".join(clean(line, len(line)) for line in lines).strip("\n")


def _sentence(text: str) -> str:
    first = text[:1] if text.startswith("vLLM") else text[:1].upper()
    return first + text[1:] + ("" if text.endswith(".") else ".")
