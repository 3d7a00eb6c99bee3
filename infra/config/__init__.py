"""The experiment: RunConfig, its sections, and the rules between them."""

from infra.config.sections.batch import BatchConfig as BatchConfig
from infra.config.sections.batch import OverlongConfig as OverlongConfig
from infra.config.sections.data import DataConfig as DataConfig
from infra.config.sections.data import DataPart as DataPart
from infra.config.sections.engine import ColocationChoice as ColocationChoice
from infra.config.sections.engine import ColocationPlan as ColocationPlan
from infra.config.sections.engine import EngineConfig as EngineConfig
from infra.config.sections.evaluation import EvalConfig as EvalConfig
from infra.config.sections.evaluation import EvaluationConfig as EvaluationConfig
from infra.config.sections.export import ExportConfig as ExportConfig
from infra.config.sections.retention import RetentionConfig as RetentionConfig
from infra.config.sections.reward import HOW_REWARDS_RUN as HOW_REWARDS_RUN
from infra.config.sections.reward import RewardConfig as RewardConfig
from infra.config.sections.run import RunConfig as RunConfig
from infra.config.sections.sampling import SamplingConfig as SamplingConfig
from infra.config.sections.tracking import TrackingConfig as TrackingConfig
from infra.config.sections.trainer import ALL_LINEAR as ALL_LINEAR
from infra.config.sections.trainer import ATTENTION as ATTENTION
from infra.config.sections.trainer import CorrectionConfig as CorrectionConfig
from infra.config.sections.trainer import KlConfig as KlConfig
from infra.config.sections.trainer import LoraConfig as LoraConfig
from infra.config.sections.trainer import LossConfig as LossConfig
from infra.config.sections.trainer import TrainerConfig as TrainerConfig
from infra.config.tools.base import ConfigBase as ConfigBase
from infra.config.tools.names import NameInForm as NameInForm
from infra.config.tools.names import checked_name as checked_name
