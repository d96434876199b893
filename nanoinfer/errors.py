"""The errors that nanoinfer raises on purpose.

    NanoinferError
    |-- ConfigError (ValueError)         an option of LLM, or two that do not go together
    |-- ModelError (ValueError)          a model folder, config.json or checkpoint that cannot be used
    |-- RequestError (ValueError)        a prompt or sampling parameter that cannot be served
    |-- JobError (ValueError)            input or output of a batch job that cannot be used
    |-- WorkerError (RuntimeError)       a process of a tensor-parallel engine has ended
    `-- EngineClosedError (RuntimeError) a call to an engine that was closed

Every message says what was wrong, the value, and what to do. Catching ValueError catches all that a user can mend.
"""


class NanoinferError(Exception):
    """Anything that nanoinfer raises on purpose."""


class ConfigError(NanoinferError, ValueError):
    """An option of `LLM` is out of range, or does not fit the model or the device."""


class ModelError(NanoinferError, ValueError):
    """The model's folder, its config.json or its weights are missing, incomplete or of a kind not supported."""


class RequestError(NanoinferError, ValueError):
    """A prompt or a sampling parameter is invalid; nothing was queued."""


class JobError(NanoinferError, ValueError):
    """The input or the output file of a batch job cannot be used, or they do not belong together."""


class EngineClosedError(NanoinferError, RuntimeError):
    """The engine was closed before this call."""


class WorkerError(NanoinferError, RuntimeError):
    """A process of a tensor-parallel engine has ended; the message has its traceback or its exit signal."""
