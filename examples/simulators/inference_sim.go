// Answers `workbench certify` for inference-sim: its simulator, batch formation and KV cache, with steps of equal length.
//
// Put this file into cmd/certify of a checkout of github.com/inference-sim/inference-sim, and build it there:
//
//	go build -o blis-certify ./cmd/certify
//	workbench certify ./blis-certify
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/inference-sim/inference-sim/sim"
	"github.com/inference-sim/inference-sim/sim/kv"
	"github.com/sirupsen/logrus"
)

const ticks = 1000 // of a step

type given struct {
	ID      string         `json:"id"`
	Config  map[string]any `json:"config"`
	Request []struct {
		ID       string        `json:"id"`
		Prompt   []sim.TokenID `json:"prompt_token_ids"`
		Output   []sim.TokenID `json:"output_token_ids"`
		Arrival  int64         `json:"arrival_step"`
		Abort    *int64        `json:"abort_step"`
		Priority int           `json:"priority"`
		Salt     string        `json:"cache_salt"`
		Adapter  string        `json:"adapter"`
		Grammar  any           `json:"grammar"`
	} `json:"requests"`
}

type chunk struct {
	ID     string `json:"id"`
	Start  int64  `json:"start"`
	Tokens int64  `json:"num_tokens"`
}

type step struct {
	Chunks    []chunk          `json:"chunks"`
	Hits      map[string]int64 `json:"hits"`
	Preempted []string         `json:"preempted"`
	Finished  []string         `json:"finished"`
}

func nothing() step {
	return step{[]chunk{}, map[string]int64{}, []string{}, []string{}}
}

// watched tells what is allocated and released.
type watched struct {
	*kv.KVCacheState
	caches   bool
	starts   map[string]int64
	hits     map[string]int64
	released []string
}

func (w *watched) GetCachedBlocks(tokens []sim.TokenID) []int64 {
	if !w.caches {
		return nil
	}
	return w.KVCacheState.GetCachedBlocks(tokens)
}

func (w *watched) AllocateKVBlocks(req *sim.Request, start, end int64, cached []int64) bool {
	done := w.KVCacheState.AllocateKVBlocks(req, start, end, cached)
	if done {
		w.starts[req.ID] = start
		if req.State == sim.StateQueued {
			w.hits[req.ID] = start
		}
	}
	return done
}

func (w *watched) ReleaseKVBlocks(req *sim.Request) {
	w.released = append(w.released, req.ID)
	w.KVCacheState.ReleaseKVBlocks(req)
}

// stepped makes every step equally long, and keeps what is in it.
type stepped struct {
	cache *watched
	steps []step
	now   func() int64
}

func (s *stepped) StepTime(batch []*sim.Request) int64 {
	made := nothing()
	made.Hits, made.Preempted = s.cache.hits, append(made.Preempted, s.cache.released...)
	for _, req := range batch {
		made.Chunks = append(made.Chunks, chunk{req.ID, s.cache.starts[req.ID], int64(req.NumNewTokens)})
	}
	for int64(len(s.steps)) < (s.now()+1)/ticks {
		s.steps = append(s.steps, nothing())
	}
	s.steps = append(s.steps, made)
	s.cache.hits, s.cache.released = map[string]int64{}, nil
	return ticks
}
func (s *stepped) QueueingTime(*sim.Request) int64  { return 0 }
func (s *stepped) OutputTokenProcessingTime() int64 { return 0 }
func (s *stepped) PostDecodeFixedOverhead() int64   { return 0 }

func number(config map[string]any, name string, otherwise int64) int64 {
	if value, ok := config[name].(float64); ok {
		return int64(value)
	}
	return otherwise
}

func answer(asked given) (told map[string]any) {
	config := asked.Config
	// Its adapters wait for a load, and not for one of max_loras places: another feature.
	for _, name := range []string{"num_speculative_tokens", "async_scheduling", "kv_cache_groups", "max_loras",
		"long_prefill_token_threshold_adaptive", "max_num_scheduled_tokens", "max_num_active_seqs", "watermark"} {
		if value, ok := config[name]; ok && value != false {
			return map[string]any{"unsupported": "no " + name}
		}
	}
	if config["enable_chunked_prefill"] == false {
		return map[string]any{"unsupported": "prompts are always cut into chunks"}
	}
	defer func() {
		if problem := recover(); problem != nil {
			told = map[string]any{"unsupported": fmt.Sprint(problem)}
		}
	}()
	cache := &watched{
		KVCacheState: kv.NewKVCacheState(number(config, "num_blocks", 512)-1, number(config, "block_size", 16)),
		caches:       config["enable_prefix_caching"] != false,
		starts:       map[string]int64{}, hits: map[string]int64{},
	}
	kept := &stepped{cache: cache, steps: []step{}}
	settings := sim.SimConfig{Horizon: 1 << 40}
	settings.MaxNumSeqs = number(config, "max_num_seqs", 16)
	settings.MaxNumBatchedTokens = number(config, "max_num_batched_tokens", 512)
	settings.LongPrefillTokenThreshold = number(config, "long_prefill_token_threshold", 0)
	settings.SLOPriorityOverrides = map[string]int{}
	if config["policy"] == "priority" {
		settings.Scheduler, settings.PreemptionPolicy = "priority-fcfs", "priority"
	}
	for _, one := range asked.Request {
		settings.SLOPriorityOverrides[fmt.Sprint("class", one.Priority)] = -one.Priority
	}
	run, err := sim.NewSimulator(settings, cache, kept)
	if err != nil {
		return map[string]any{"unsupported": err.Error()}
	}
	kept.now = func() int64 { return run.Clock }
	run.OnRequestDone = func(req *sim.Request, tick int64) []*sim.Request {
		if req.State == sim.StateCompleted {
			last := &kept.steps[len(kept.steps)-1]
			last.Finished = append(last.Finished, req.ID)
		}
		cache.released = nil // by its end, not by a preemption
		return nil
	}
	for _, one := range asked.Request {
		if one.Salt != "" || one.Grammar != nil {
			return map[string]any{"unsupported": "no cache_salt and no grammar"}
		}
		made := &sim.Request{ID: one.ID, InputTokens: one.Prompt, OutputTokens: one.Output, State: sim.StateQueued,
			ArrivalTime: one.Arrival * ticks, SLOClass: fmt.Sprint("class", one.Priority), MaxOutputLen: len(one.Output)}
		if one.Abort != nil {
			if *one.Abort <= one.Arrival {
				continue
			}
			made.Deadline = *one.Abort*ticks - 1
		}
		run.InjectArrival(made)
	}
	for run.HasPendingEvents() && len(kept.steps) < 1000 {
		run.ProcessNextEvent()
	}
	return map[string]any{"steps": kept.steps}
}

func main() {
	logrus.SetOutput(io.Discard)
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<26)
	for lines.Scan() {
		var asked given
		if err := json.Unmarshal(lines.Bytes(), &asked); err != nil {
			panic(err)
		}
		text, _ := json.Marshal(answer(asked))
		fmt.Println(string(text))
	}
}
