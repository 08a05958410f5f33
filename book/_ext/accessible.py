"""What a reader with a screen reader needs of pages that Markdown cannot say."""

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform


class HeadRows(SphinxPostTransform):
    """A Markdown table has a head. Where that is empty it goes, and the first column heads the rows."""

    default_priority = 400

    def run(self, **kwargs):
        for head in list(self.document.findall(nodes.thead)):
            if head.astext().strip():
                continue
            group = head.parent
            group.remove(head)
            next(group.findall(nodes.colspec))["stub"] = 1


def setup(app):
    app.add_post_transform(HeadRows)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
