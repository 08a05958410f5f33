"""What ends a server, by the last line that one sees, from the doctor's rules.

    ```{oom-jumps}                 links to every entry, by when it comes
    ```
    ```{oom-entries}               the entries: the lines, what they mean, the first fix and its cost, what cannot help
    ```

Nothing of it is written here: the lines are ``doctor_rules.PRINTED``, and what a fix changes is what ``memlab.doctor``
says of just these lines. Each entry has its phase as its id.
"""

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from memlab import doctor, doctor_rules, vllm_log
from memlab.facts import Facts
from memlab.finding_view import words
from memlab.ledger import MemoryLedger
from memlab.plots import capitalised
from memlab.remedies import REMEDIES
from memlab.vllm_log import StatedKV

TITLES = {
    "start": "While it starts, in order",
    "serving": "While it serves",
    "not_the_gpu": "Not the GPU's memory",
}
HARMLESS = "harmless"
# A failure of which nothing is known but its phase: of the old engine, with a pool that was given, on a CPU.
WITHOUT_NUMBERS = (
    Facts(None, StatedKV(), {}, {}, engine="V0"),
    Facts(MemoryLedger("stated", pool_given=True), StatedKV(), {}, {}),
    Facts(None, StatedKV(), {"requested_gib": 1.0}, {}),
)


def change_of(phase: str, remedy: str) -> tuple[object, object]:
    """What a remedy changes, (from, to): by the numbers of the phase's lines, else in words."""
    (failure,) = doctor.diagnose("\n".join(doctor_rules.PRINTED[phase])).failures
    for fix in failure.fixes:
        if (fix.flag, fix.why) == (REMEDIES[remedy].flag, dict(doctor_rules.RULES[phase].remedies)[remedy]):
            return fix.from_, fix.to
    sizes = (REMEDIES[remedy].size(facts) for facts in WITHOUT_NUMBERS)
    from_, to, _ = next((size for size in sizes if size is not None), (None, "where the log shows it", None))
    return from_, to


def in_words(from_: object, to: object) -> str:
    if isinstance(to, bool):
        return "on" if to else "off"
    if from_ is None:
        return str(to)
    return f"{to}; they hold {from_}" if to == "ended" else f"{to} instead of {from_}"


def sentence(text: str) -> str:
    return capitalised(text) + ("" if text.endswith(".") else ".")


def fix_of(phase: str, remedy: str, why: str) -> list[nodes.Node]:
    flag = REMEDIES[remedy].flag
    change = in_words(*change_of(phase, remedy))
    costs = [nodes.emphasis("", "Costs:"), nodes.Text(f" {REMEDIES[remedy].costs}.")]
    return [nodes.literal("", flag), nodes.Text(f": {change}. {sentence(why)} "), *costs]


def bullets(items: list[list[nodes.Node]]) -> nodes.bullet_list:
    return nodes.bullet_list("", *(nodes.list_item("", nodes.paragraph("", "", *item)) for item in items))


def link(target: str, text: str) -> nodes.paragraph:
    # vLLM's own words keep their dashes and quotes.
    reference = nodes.reference("", text, refid=target, internal=True, support_smartquotes=False)
    return nodes.paragraph("", "", reference)


def heard(line: str) -> str:
    """A harmless line by the words that the parser knows it by."""
    anchors = [row.anchor for row in vllm_log.ROWS if row.kind == line]
    return " / ".join(f"… {anchor.strip()} …" for anchor in anchors) or "WARNING … CUDA out of memory …"


class Jumps(SphinxDirective):
    def run(self):
        found = []
        for when, phases in doctor_rules.WHEN.items():
            lines = [link(phase, doctor_rules.RULES[phase].last_line) for phase in phases]
            found += [nodes.paragraph("", "", nodes.strong("", TITLES[when])), listed(lines)]
        more = nodes.paragraph("", "", nodes.strong("", "Looks like it, and is not"))
        return [*found, more, listed([link(HARMLESS, "Lines that are harmless")])]


def listed(items: list[nodes.paragraph]) -> nodes.bullet_list:
    return nodes.bullet_list("", *(nodes.list_item("", item) for item in items), classes=["memlab-jumps"])


class Entries(SphinxDirective):
    def run(self):
        found = []
        for when, phases in doctor_rules.WHEN.items():
            section = nodes.section("", nodes.title("", TITLES[when]), ids=[f"when-{when.replace('_', '-')}"])
            section += [self.entry(doctor_rules.RULES[phase]) for phase in phases]
            found.append(section)
        return [*found, self.harmless()]

    @staticmethod
    def entry(rule: doctor_rules.Rule) -> nodes.section:
        lines = "\n".join(doctor_rules.PRINTED[rule.phase])
        (first, why), *others = rule.remedies
        section = nodes.section("", nodes.title("", words(rule.phase)), ids=[rule.phase], classes=["memlab-oom"])
        section += nodes.literal_block(lines, lines, language="text")
        section += nodes.paragraph("", sentence(rule.means))
        head = [nodes.strong("", "First fix."), nodes.Text(" ")]
        section += nodes.paragraph("", "", *head, *fix_of(rule.phase, first, why))
        if others:
            section += nodes.paragraph("", "", nodes.strong("", "What else helps"))
            section += bullets([fix_of(rule.phase, *other) for other in others])
        if rule.useless:
            section += nodes.paragraph("", "", nodes.strong("", "What cannot help"))
            useless = [[nodes.literal("", flag), nodes.Text(f": {sentence(why)}")] for flag, why in rule.useless]
            section += bullets(useless)
        return section

    @staticmethod
    def harmless() -> nodes.section:
        section = nodes.section("", nodes.title("", "Looks like it, and is not"), ids=[HARMLESS])
        items = [
            [nodes.literal("", heard(kind)), nodes.Text(f": {sentence(why)}")]
            for kind, why in doctor_rules.HARMLESS.items()
        ]
        section += bullets(items)
        return section


def setup(app):
    app.setup_extension("record_pages")  # finds memlab
    app.add_directive("oom-jumps", Jumps)
    app.add_directive("oom-entries", Entries)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
