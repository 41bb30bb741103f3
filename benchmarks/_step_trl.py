"""The rival of `bench step --rival trl`: run by the interpreter that has TRL, so it imports nothing of ours.

Reads the work as JSON from standard input. Prints lines of progress, and last RESULT followed by JSON: seconds and tokens of each step.
"""

import json
import os
import sys
import tempfile
import time

RESULT = "BENCH-STEP-RESULT "


def main():
    work = json.load(sys.stdin)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    torch.set_num_threads(work["threads"])
    tokens, seconds = [], []

    def reward(completions, completion_ids, **unused):
        tokens.append(sum(map(len, completion_ids)))
        return [float(len(text) % 2) for text in completions]

    class Clock(TrainerCallback):
        def on_step_begin(self, *unused, **named):
            self.started = time.perf_counter()

        def on_step_end(self, *unused, **named):
            seconds.append(time.perf_counter() - self.started)
            print("trl: step %d in %.2f s, %d tokens" % (len(seconds), seconds[-1], tokens[-1]), flush=True)

    samples, prompts = work["samples"], work["prompts"]
    whole = work["prompts_per_step"] * samples
    micro = next(n for n in range(min(work["micro_batch"], whole), 0, -1) if whole % n == 0)
    with tempfile.TemporaryDirectory() as directory:
        arguments = trl.GRPOConfig(
            output_dir=directory, per_device_train_batch_size=micro, gradient_accumulation_steps=whole // micro, num_generations=samples,
            max_completion_length=work["max_tokens"], temperature=1.0, beta=0.0, learning_rate=work["lr"], max_steps=work["steps"],
            bf16=work["dtype"] == "bfloat16", use_cpu=work["device"] == "cpu", gradient_checkpointing=False, report_to=[], save_strategy="no",
            logging_steps=1, disable_tqdm=True, model_init_kwargs={"dtype": work["dtype"]}, seed=1)
        trl.GRPOTrainer(model=work["model"], reward_funcs=reward, args=arguments, train_dataset=Dataset.from_dict({"prompt": prompts}),
                        processing_class=AutoTokenizer.from_pretrained(work["model"], padding_side="left"), callbacks=[Clock()]).train()
    print(RESULT + json.dumps({"version": trl.__version__, "seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
