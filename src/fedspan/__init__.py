"""fedspan: train one model over many clients whose data differ, with r numbers per message instead of d.

Names are imported when they are first used, so that `import fedspan` is fast. Choices are in namespaces:
`fedspan.methods.SSF`, `fedspan.projectors.Gaussian`, `fedspan.compressors.QSGD`, `fedspan.optimizers.AdamW`.
"""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

__version__ = "0.2.0"

if TYPE_CHECKING:
    # choices, one file each
    from fedspan import aggregators as aggregators
    from fedspan import callbacks as callbacks
    from fedspan import compressors as compressors
    from fedspan import data as data
    from fedspan import downlinks as downlinks
    from fedspan import drifts as drifts
    from fedspan import methods as methods
    from fedspan import metrics as metrics
    from fedspan import optimizers as optimizers
    from fedspan import projectors as projectors
    from fedspan import servers as servers
    from fedspan import uplinks as uplinks

    # what users call
    from fedspan.api.diagnose import diagnose as diagnose
    from fedspan.api.fit import fit as fit
    from fedspan.api.run import run as run

    # what authors of methods, projectors, compressors, aggregators, optimizers and tasks use
    from fedspan.core.aggregator import Aggregator as Aggregator
    from fedspan.core.axes import Downlink as Downlink
    from fedspan.core.axes import Drift as Drift
    from fedspan.core.axes import Optimizer as Optimizer
    from fedspan.core.axes import Parts as Parts
    from fedspan.core.axes import Server as Server
    from fedspan.core.axes import Uplink as Uplink
    from fedspan.core.bundle import Bundle as Bundle
    from fedspan.core.callback import Callback as Callback
    from fedspan.core.compressor import Compressor as Compressor
    from fedspan.core.config import Engine as Engine
    from fedspan.core.config import Participation as Participation
    from fedspan.core.config import Projection as Projection
    from fedspan.core.config import Training as Training
    from fedspan.core.encoded import Encoded as Encoded
    from fedspan.core.errors import FedspanError as FedspanError
    from fedspan.core.errors import SpecError as SpecError
    from fedspan.core.errors import Terminated as Terminated
    from fedspan.core.federation import Federation as Federation
    from fedspan.core.layout import Block as Block
    from fedspan.core.layout import Layout as Layout
    from fedspan.core.layout import Vector as Vector
    from fedspan.core.method import Method as Method
    from fedspan.core.metric import Metric as Metric
    from fedspan.core.objective import Objective as Objective
    from fedspan.core.objective import Problem as Problem
    from fedspan.core.privacy import Privacy as Privacy
    from fedspan.core.projector import LinearMap as LinearMap
    from fedspan.core.projector import Projector as Projector
    from fedspan.core.registry import register as register
    from fedspan.core.round import Round as Round
    from fedspan.core.spec import Spec as Spec
    from fedspan.core.sync import Log as Log
    from fedspan.core.sync import ModelSync as ModelSync
    from fedspan.core.task import Task as Task
    from fedspan.costs.plan import plan as plan
    from fedspan.engine.result import Result as Result
    from fedspan.engine.result import load as load

    # Hugging Face adapters
    from fedspan.huggingface.adapters import export_change as export_change
    from fedspan.study.compare import Comparison as Comparison
    from fedspan.study.compare import compare as compare
    from fedspan.study.compare import tune as tune
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
