"""Watching what the Trainer of transformers trains."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip(
    "accelerate", reason="accelerate, which the Trainer of transformers needs, is not installed"
)

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from kedge.integrations.huggingface import HuggingFaceCallback
from kedge.store.recording import Recording
from kedge.testing import assert_unhooked

EXAMPLES, LENGTH, HIDDEN = 24, 6, 8


def train(folder, what=None, *callbacks, **options):
    """Train a tiny model for one epoch on the CPU; return the callback and the trainer."""
    callback = HuggingFaceCallback(what)
    sizes = {
        "vocab_size": 20,
        "hidden_size": HIDDEN,
        "intermediate_size": 16,
        "max_position_embeddings": LENGTH,
    }
    model = BertForSequenceClassification(
        BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    )
    data = [
        {"input_ids": torch.randint(0, 20, (LENGTH,)), "labels": torch.tensor(i % 2)}
        for i in range(EXAMPLES)
    ]
    given = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "save_strategy": "no",
        **options,
    }
    arguments = TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, **given)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=[callback, *callbacks],
    )
    trainer.train()
    return callback, trainer


def test_what_the_trainer_logs_is_recorded(watch, tmp_path):
    """Losses of the training and of evaluations, with the steps of the optimizer that they belong to."""
    options = {"logging_steps": 4, "eval_strategy": "steps", "eval_steps": 6}
    callback, trainer = train(tmp_path, watch(every=1), **options)
    logged = Recording.open(callback.watched.recording).logged

    assert logged["loss"].steps.tolist() == [3, 7, 11]
    assert logged["eval_loss"].steps.tolist() == [5, 11]
    told = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert logged["eval_loss"].values.tolist() == told
    assert "epoch" not in logged


def test_a_run_with_accumulation_evaluation_and_checkpoints(watch, tmp_path):
    """Steps are the optimizer's, evaluations are not in them, and checkpoints are what they are without Kedge."""
    options = {"gradient_accumulation_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    callback, trainer = train(
        tmp_path, watch(every=1), save_strategy="steps", save_steps=2, **options
    )
    recording = Recording.open(callback.watched.recording)

    assert trainer.state.global_step == 4
    assert recording.steps.tolist() == [0, 1, 2, 3]
    assert recording.rows("bert.embeddings:out").calls.tolist() == [3] * 4
    assert recording.rows("bert.embeddings:out").count.tolist() == [3 * 2 * LENGTH * HIDDEN] * 4
    assert recording.rows("classifier.weight:param.grad").step.tolist() == [0, 1, 2, 3]
    assert (
        recording.rows("classifier.weight:param.grad").calls.tolist() == [1] * 4
    )  # when all three have added to it
    assert recording.roots[0].prefix == ""
    assert recording.end.exit == 0
    assert {"checkpoint-2", "checkpoint-4"} <= {path.name for path in tmp_path.iterdir()}
    assert_unhooked(trainer.model)


def test_values_of_mixed_precision_are_those_the_modules_make(watch, tmp_path):
    """Under bf16 an output is bfloat16, and a parameter's gradient float32."""
    callback, _ = train(tmp_path, watch(every=1), bf16=True)
    recording = Recording.open(callback.watched.recording)

    assert recording.site("bert.encoder.layer.0.intermediate.dense:out").dtype == "bfloat16"
    assert recording.site("classifier.weight:param.grad").dtype == "float32"


def test_the_recording_is_where_the_trainer_leaves_its_results(tmp_path, capsys):
    """Without a place of its own, it is in the trainer's folder, and a message names it."""
    callback, _ = train(tmp_path / "out")

    assert callback.watched.recording.parent == tmp_path / "out"
    assert f"see more with: kedge report {callback.watched.recording}" in capsys.readouterr().err


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise RuntimeError("no more data")


def test_after_an_exception_the_watching_can_be_ended(watch, tmp_path):
    """The trainer tells nobody that it failed: the watching goes on until it is ended, and then leaves nothing."""
    watched = watch(every=1)
    with pytest.raises(RuntimeError, match="no more data"):
        train(tmp_path, watched, Fails())
    watched.end()

    assert Recording.open(watched.recording).steps.tolist() == [0]


def test_training_again_has_a_recording_of_its_own(watch, tmp_path):
    """What was under way when an exception ended the training is finished, and the next is numbered."""
    watched = watch(every=1)
    with pytest.raises(RuntimeError, match="no more data"):
        train(tmp_path, watched, Fails())
    train(tmp_path, watched)

    assert Recording.open(tmp_path / "run.kedge").end.steps == 1
    assert Recording.open(tmp_path / "run-2.kedge").end.steps == EXAMPLES // 2


@pytest.mark.filterwarnings("ignore::FutureWarning")  # trl uses what transformers has deprecated
def test_a_trainer_of_trl_is_one_of_transformers(watch, tmp_path):
    """The trainers of TRL take the same callback; the model has its names, and the reference model is not measured."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets, which trl needs, is not installed")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(10))]
    plain = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    )
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>"
    )
    sizes = {"vocab_size": len(words), "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32}
    config = GPT2Config(**sizes, eos_token_id=1, bos_token_id=1, pad_token_id=0)
    given = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "save_strategy": "no",
    }
    given |= {"use_cpu": True, "bf16": False, "disable_tqdm": True}
    texts = [{"text": "w1 w2 w3 w4"}] * 16
    pairs = [{"prompt": "w1 w2 ", "chosen": "w3 w4", "rejected": "w5 w6"}] * 16
    for name, rows in (("SFT", texts), ("DPO", pairs)):
        callback = HuggingFaceCallback(watch(f"{name}.kedge", every=1))
        reference = {"ref_model": GPT2LMHeadModel(config)} if name == "DPO" else {}
        arguments = getattr(trl, f"{name}Config")(str(tmp_path), **given)
        trainer = getattr(trl, f"{name}Trainer")(
            GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[callback],
            **reference,
        )
        trainer.train()
        recording = Recording.open(callback.watched.recording)

        assert recording.steps.tolist() == [0, 1, 2, 3]
        assert {"transformer.h.0.attn:out", "transformer.wte.weight:param.grad", "loss"} <= {
            s.site for s in recording.sites
        }
        assert not [
            site.site for site in recording.sites if site.site.startswith("GPT2LMHeadModel")
        ]
        assert recording.end.error is None
