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
	"maps"
	"os"
	"slices"

	"github.com/inference-sim/inference-sim/sim"
	"github.com/inference-sim/inference-sim/sim/kv"
	"github.com/sirupsen/logrus"
)

const ticks = 1000 // of a step

// The settings that it has. A setting that is not here is not passed over: the schedule would be that of another workload.
// Among them: its adapters wait for a load, and not for one of max_loras places; it does not reserve whole prompts.
var known = map[string]bool{"num_blocks": true, "block_size": true, "max_num_seqs": true, "max_num_batched_tokens": true,
	"max_model_len": true, "long_prefill_token_threshold": true, "policy": true, "enable_prefix_caching": true}

// The settings of which it has one value.
var same = map[string]any{"enable_chunked_prefill": true, "async_scheduling": false}

var fields = map[string]bool{"id": true, "prompt_token_ids": true, "output_token_ids": true, "max_tokens": true,
	"arrival_step": true, "arrival_time": true, "abort_step": true, "priority": true}

type given struct {
	ID      string           `json:"id"`
	Config  map[string]any   `json:"config"`
	Request []map[string]any `json:"requests"`
}

type request struct {
	ID       string        `json:"id"`
	Prompt   []sim.TokenID `json:"prompt_token_ids"`
	Output   []sim.TokenID `json:"output_token_ids"`
	Arrival  int64         `json:"arrival_step"`
	Abort    *int64        `json:"abort_step"`
	Priority int           `json:"priority"`
}

func read(listed []map[string]any) (requests []request, problem error) {
	text, _ := json.Marshal(listed)
	problem = json.Unmarshal(text, &requests)
	return requests, problem
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
	for _, name := range slices.Sorted(maps.Keys(config)) {
		if value := config[name]; !known[name] && value != same[name] {
			return map[string]any{"unsupported": "no " + name}
		}
	}
	for _, one := range asked.Request {
		for _, name := range slices.Sorted(maps.Keys(one)) {
			if !fields[name] {
				return map[string]any{"unsupported": "no " + name + " of a request"}
			}
		}
	}
	requests, problem := read(asked.Request)
	if problem != nil {
		return map[string]any{"unsupported": problem.Error()}
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
	for _, one := range requests {
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
	for _, one := range requests {
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
