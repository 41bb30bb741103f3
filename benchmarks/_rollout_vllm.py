"""The rival of `bench rollout --rival vllm`: run by the interpreter that has vLLM, so it imports nothing of ours.

Reads the work as JSON from standard input. Prints lines of progress, and last RESULT followed by JSON: seconds by kind of lengths.
"""

import json
import os
import sys
import time

RESULT = "BENCH-ROLLOUT-RESULT "


def main():
    work = json.load(sys.stdin)
    os.environ.setdefault("OMP_NUM_THREADS", str(work["threads"]))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm

    prompts, samples = work["prompts"], work["samples"]
    longest = max(map(len, prompts)) + max(max(lengths) for lengths in work["lengths"].values())
    engine = vllm.LLM(model=work["model"], dtype=work["dtype"], max_model_len=longest, max_num_seqs=len(prompts) * samples, seed=0,
                      disable_log_stats=True)

    def run(lengths):
        """Seconds for `lengths` of all samples; the log-prob of each sampled token is asked for, as our engine always gives it."""
        def params(n, count):
            return vllm.SamplingParams(n=n, temperature=1.0, max_tokens=count, ignore_eos=True, logprobs=0, detokenize=False)

        if len(set(lengths)) == 1:
            asked = [{"prompt_token_ids": ids} for ids in prompts]
            sampling = [params(samples, lengths[0])] * len(prompts)
        else:
            asked = [{"prompt_token_ids": prompts[i // samples]} for i in range(len(lengths))]
            sampling = [params(1, count) for count in lengths]
        engine.reset_prefix_cache()
        started = time.perf_counter()
        outputs = engine.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        made = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        if made != sum(lengths):
            raise SystemExit("vLLM made %d tokens of %d" % (made, sum(lengths)))
        return seconds

    run([2] * len(prompts) * samples)
    seconds = {}
    for kind, lengths in work["lengths"].items():
        for number in range(work["repeat"]):
            found = run(lengths)
            seconds[kind] = min(found, seconds.get(kind, found))
            print("vllm, %s: run %d of %d, %d tokens in %.2f s" % (kind, number + 1, work["repeat"], sum(lengths), found), flush=True)
    print(RESULT + json.dumps({"version": vllm.__version__, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
