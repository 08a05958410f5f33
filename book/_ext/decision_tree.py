"""The doctor's rules as a tree of questions: when did it end, and what does the last line say?

    ```{decision-tree}
    ```

The questions stand here, in the order in which vLLM does things; what a leaf says comes from ``doctor.RULES`` and
``REMEDIES``. A rule that has no leaf, or two, fails the build.
"""

from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from memlab.doctor import REMEDIES, RULES

OOM_NOW = "oom-now.html"  # beside the chapter; its entries go by the phase

# An answer to its phases, or to a question of its own.
WHEN = {
    "It ended, and the GPU's memory is what it names": {
        "before a weight was loaded": ("free_memory_at_startup", "nccl_init_oom"),
        "while the weights were loaded": ("weights_load",),
        "after “Model loading took”, before the pool has a size": (
            "memory_profile",
            "multimodal_profile",
            "profile_assert_free_grew",
        ),
        "when the pool got its size, or its memory": (
            "kv_cache_none",
            "max_model_len_exceeds_kv",
            "mamba_blocks_lt_max_num_seqs",
            "kv_cache_alloc_oom",
        ),
        "after “GPU KV cache size”, before it was ready": ("kernel_warmup", "cuda_graph_capture", "sampler_warmup"),
        "while it served": ("runtime_prefill_spike", "runtime_logprobs", "sampler", "runtime_oom"),
        "at any time, and the message lists other processes": ("other_process_on_gpu",),
        "when it woke up from sleep": ("sleep_wake_up",),
    },
    "It ended, and no line names the GPU": {
        "“Killed”, or exit code 137": ("host_ram_oom",),
        "a word about swap space (old versions)": ("host_swap_space_config", "kv_swap_exhausted"),
    },
    "It runs": {
        "slowly, and requests wait": ("preemption_not_oom",),
    },
}


def leaves(tree=WHEN) -> list[str]:
    """The phases of the tree, in its order."""
    return [phase for value in tree.values() for phase in (value if isinstance(value, tuple) else leaves(value))]


def check() -> None:
    """Raises ExtensionError where rules and leaves are not the same."""
    there = leaves()
    twice = {phase for phase in there if there.count(phase) > 1}
    wrong = twice | (set(there) ^ set(RULES))
    if wrong:
        raise ExtensionError(f"decision_tree: {', '.join(sorted(wrong))}: a rule needs one leaf, and a leaf its rule")


class DecisionTree(SphinxDirective):
    def run(self):
        return [nodes.container("", branch(WHEN), classes=["memlab-tree"])]


def branch(tree) -> nodes.bullet_list:
    found = nodes.bullet_list()
    for answer, value in tree.items():
        item = nodes.list_item("", nodes.paragraph("", "", nodes.strong("", answer)))
        if isinstance(value, tuple):
            item += nodes.bullet_list("", *(leaf(phase) for phase in value))
        else:
            item += branch(value)
        found += item
    return found


def leaf(phase: str) -> nodes.list_item:
    """A phase: the line, what it means, and the first flag to move."""
    rule = RULES[phase]
    first, why = rule.remedies[0]
    remedy = REMEDIES[first]
    name = nodes.reference("", "", nodes.literal("", phase), refuri=f"{OOM_NOW}#{phase}", internal=True)
    said = nodes.paragraph("", "", name, nodes.Text(f": “{rule.last_line}”"))
    flag = nodes.literal("", remedy.flag) if remedy.flag.startswith("-") else nodes.Text(remedy.flag)
    means = rule.means[:1].upper() + rule.means[1:]
    first_fix = nodes.paragraph(
        "", "", nodes.Text(f"{means}. First: "), flag, nodes.Text(f" ({why}; costs: {remedy.costs}).")
    )
    return nodes.list_item("", said, first_fix, classes=["memlab-leaf"])


def setup(app):
    check()
    app.add_directive("decision-tree", DecisionTree)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
