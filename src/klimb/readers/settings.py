"""What other frameworks call the settings that remedies change."""

from __future__ import annotations

from klimb.doctor.finding import Remedy

SETTINGS: dict[str, dict[str, str]] = {
    "verl": {
        "training.lr": "actor_rollout_ref.actor.optim.lr",
        "critic.lr": "critic.optim.lr",
        "critic.warmup_phases": "trainer.critic_warmup",
        "algorithm.use_pf_ppo": "algorithm.rollout_correction.bypass_mode (the other way round)",
        "algorithm.use_kl_loss": "actor_rollout_ref.actor.use_kl_loss",
        "algorithm.kl_ctrl.type": "algorithm.kl_ctrl.type (acts on the KL in the reward only)",
        "algorithm.kl_ctrl.init_kl_coef": "actor_rollout_ref.actor.kl_loss_coef, algorithm.kl_ctrl.kl_coef",
        "algorithm.ppo_epochs": "actor_rollout_ref.actor.ppo_epochs",
        "algorithm.entropy_coef": "actor_rollout_ref.actor.entropy_coeff",
        "algorithm.clip_ratio_high": "actor_rollout_ref.actor.clip_ratio_high",
        "algorithm.loss_agg": "actor_rollout_ref.actor.loss_agg_mode",
        "algorithm.filter_groups": "algorithm.filter_groups.enable",
        "algorithm.rollout_correction.weights": "algorithm.rollout_correction.rollout_is",
        "algorithm.adv_estimator": "algorithm.adv_estimator",
        "algorithm.truncated": "reward.reward_manager.name=dapo with its overlong buffer",
        "actor_rollout_ref.temperature": "actor_rollout_ref.rollout.temperature",
        "actor_rollout_ref.max_tokens": "data.max_response_length",
        "actor_rollout_ref.max_tokens_per_micro_batch": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "training.gradient_accumulation_steps": "actor_rollout_ref.actor.ppo_mini_batch_size",
        "training.micro_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "training.max_grad_norm": "actor_rollout_ref.actor.grad_clip",
        "training.dtype": "actor_rollout_ref.actor.fsdp_config.dtype",
        "training.activation_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
        "training.offload.params": "actor_rollout_ref.ref.fsdp_config.param_offload",
        "training.offload.optimizer": "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
        "reward_model.clip": "the reward function itself (reward.custom_reward_function)",
        "reward_model.normalize": "the reward function itself (reward.custom_reward_function)",
    },
    "trl": {
        "training.lr": "learning_rate",
        "critic.lr": "learning_rate (one for both)",
        "algorithm.use_kl_loss": "beta above 0",
        "algorithm.kl_ctrl.init_kl_coef": "beta (GRPO), kl_coef (PPO)",
        "algorithm.ppo_epochs": "num_iterations (GRPO), num_ppo_epochs (PPO)",
        "algorithm.clip_ratio_high": "epsilon_high",
        "algorithm.loss_agg": "loss_type",
        "algorithm.rollout_correction.weights": "vllm_importance_sampling_correction",
        "algorithm.truncated": "mask_truncated_completions",
        "actor_rollout_ref.temperature": "temperature",
        "actor_rollout_ref.max_tokens": "max_completion_length (GRPO), response_length (PPO)",
        "training.gradient_accumulation_steps": "gradient_accumulation_steps, steps_per_generation",
        "training.micro_batch_size": "per_device_train_batch_size",
        "training.max_grad_norm": "max_grad_norm",
        "training.dtype": "bf16=False",
        "training.activation_checkpointing": "gradient_checkpointing",
        "reward_model.clip": "the reward function itself",
        "reward_model.normalize": "scale_rewards",
    },
    "openrlhf": {
        "training.lr": "--actor_learning_rate",
        "critic.lr": "--critic_learning_rate",
        "critic.warmup_phases": "--freezing_actor_steps",
        "algorithm.use_kl_loss": "--use_kl_loss",
        "algorithm.kl_ctrl.type": "--kl_target and --kl_horizon",
        "algorithm.kl_ctrl.init_kl_coef": "--init_kl_coef",
        "algorithm.ppo_epochs": "--max_epochs",
        "algorithm.entropy_coef": "--entropy_loss_coef",
        "algorithm.filter_groups": "--dynamic_filtering",
        "algorithm.rollout_correction.weights": "--enable_vllm_is_correction",
        "algorithm.adv_estimator": "--advantage_estimator",
        "actor_rollout_ref.temperature": "--temperature",
        "actor_rollout_ref.max_tokens": "--generate_max_len",
        "training.gradient_accumulation_steps": "--train_batch_size",
        "training.micro_batch_size": "--micro_train_batch_size",
        "training.max_grad_norm": "--max_norm",
        "training.activation_checkpointing": "--gradient_checkpointing",
        "reward_model.clip": "--reward_clip_range",
        "reward_model.normalize": "--normalize_reward",
    },
}
"""By framework, klimb's key to theirs; what is missing has no counterpart."""


def setting(source: str, remedy: Remedy) -> str | None:
    """What a remedy changes, in the framework's words: klimb's own override, or the names of their settings."""
    if source == "klimb":
        return remedy.override
    found = [SETTINGS.get(source, {}).get(key) for key in remedy.keys]
    return None if not found or found[0] is None else ", ".join(name for name in found if name is not None)
