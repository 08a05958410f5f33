"""The package's errors. Each message says what to do next."""


class MemlabError(Exception):
    """Anything that memlab raises on purpose."""


class FlagError(MemlabError):
    """A flag, or a combination of flags, that vLLM refuses."""


class ShapeError(MemlabError):
    """A model's config.json that lacks what a memory count needs."""


class RecordError(MemlabError):
    """A run record that breaks the schema, or that is not there."""


class ServerError(MemlabError):
    """A vLLM server that could not be started, reached or stopped."""


class TrafficError(MemlabError):
    """Load that could not be sent or measured."""


class NotebookError(MemlabError):
    """A lab that failed, also where the front end would have hidden it."""
