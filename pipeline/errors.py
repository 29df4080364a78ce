"""Every error Millpond raises on purpose. Catch broadly, recover narrowly.

MillpondError                 exit 1
|-- UsageError                exit 2   a flag, a file or a row is wrong (also a ValueError)
|   `-- RunExists             exit 2   the run's keys are there already and --resume was not given
|-- MessageError              exit 1   a message breaks the wire format; names the field (also a ValueError)
|-- GroupError                exit 1   a group of the wrong size or shape (also a ValueError)
|-- RewardError               exit 1   a reward function gave something that is no reward (also a ValueError)
|-- GenerateError             exit 1   a generate function gave something that is no sample (also a ValueError)
|-- EngineError               exit 1   an engine could not finish a request
|   |-- RequestRefused                 the engine will never serve this request (too long, bad input): final
|   `-- EngineDown                     the engine is away; the prompt is handed back without a strike
|-- WeightsError              exit 1   published weights cannot be read, or are not what was announced
|-- ServerError               exit 2   the embedded Redis cannot be started
|-- RedisUnusable             exit 2   a Redis that must not be used (eviction policy, cluster, version)
|-- RedisDown                 exit 3   Redis did not come back within its deadline
|-- WorkerFailed              exit 1   a worker died of a bug; carries the worker's traceback
|-- Starved                   exit 3   no groups within --starve-timeout; says who is missing
|-- Fenced                    exit 4   another trainer has taken this run over
`-- Stopped                   exit 130 somebody asked this run to stop
"""


class MillpondError(Exception):
    """Base of all; `exit_code` is what a command that ends with it returns."""

    exit_code = 1


class UsageError(MillpondError, ValueError):
    exit_code = 2


class RunExists(UsageError):
    pass


class MessageError(MillpondError, ValueError):
    """`field` names what is wrong in the message, e.g. `samples[3].sequences[0].logprobs`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class GroupError(MillpondError, ValueError):
    pass


class RewardError(MillpondError, ValueError):
    pass


class GenerateError(MillpondError, ValueError):
    pass


class EngineError(MillpondError):
    pass


class RequestRefused(EngineError):
    pass


class EngineDown(EngineError):
    pass


class WeightsError(MillpondError):
    pass


class ServerError(MillpondError):
    exit_code = 2


class RedisUnusable(MillpondError):
    exit_code = 2


class RedisDown(MillpondError):
    exit_code = 3


class WorkerFailed(MillpondError):
    pass


class Starved(MillpondError):
    exit_code = 3


class Fenced(MillpondError):
    exit_code = 4


class Stopped(MillpondError):
    exit_code = 130
