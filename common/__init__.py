"""What two or more of the three scripts share, and what is too long to stand in one of them.

The files stand on floors: each imports only from those above it in this list (pyproject.toml holds
the order, import-linter and tests/test_floors.py hold the files to it).

For all three scripts, without torch:
  run           flags, log lines, progress, tables, exit codes
  lifetime      waiting, stop requests, the run folder's lock
  schedule      how long a run is, its learning rate
  timing        where the time goes
  machine       CPUs and memory that this process may use
  workers       forked worker processes; none of their tasks is lost
  s3_uploads    the journal of multipart uploads, to abort what a killed run left
  s3            S3 as it is: client, failures, retries
  s3_reads      reads of S3 objects, resumed where an answer breaks
  workfolder    stage 1's local folder
  store         s3:// and local folders behind one interface
  cache         local copies of shards, shared by processes, within a limit

Stage 1, without torch:
  messages      the messages of a chat in one spelling; why a row is rejected
  rows          one JSONL line -> training rows: the layouts
  engines       tokenizers and fastokens, and where they might differ
  render        the fast renderer of one chat template
  chat          chat template, token ids, loss mask
  plan          which input ranges make which shard
  shards        shards, commit records, reader
  reading       JSONL objects in blocks of whole lines
  prompts       the requests of --prompts on local disk, by custom_id
  assembling    encoded blocks -> a shard and its rejected file
  encoding      blocks of lines -> token arrays, in the workers
  pipeline      download, encode, upload, all at once
  report        progress fields and end table
  cluster       shards as Ray tasks
  preview       --dry-run and --inspect

A run's folder and data, most of it without torch:
  evaluation_plots, evaluation_report   report.json and report.html
  stepfolders   checkpoint folders: which are whole, which are kept
  mirror        checkpoints copied into a store
  status        status.json: where a run stands
  memory        what a step takes of a device
  dist          process group, votes, heartbeat
  batches       rows -> packs -> steps, and the cursor
  breakdown     acceptance by source, part, length, position

The target and its hidden states:
  target_files  its config.json, embedding and head, and damage to them
  target_model  the target as transformers builds it, cut after the highest tap
  target        the frozen target and its taps
  target_cache  its cache, rolled back after a rejected draft
  wire          hidden states over Arrow Flight: the protocol, and computed in place
  connection    a connection to one server: what it serves, why it cannot be reached
  client        requests spread over servers
  server        the server of hidden states
  stored        hidden states in files: the format, and reading them
  storing       writing them, for the first rows of a dataset
  feed          data and hidden states asked ahead

The drafter and its losses:
  attention     of blocks over their context: dense, grouped, flex
  drafter_config    its shape and config.json, ours and published ones
  dflash2       what DFlash 2 adds: convolutions in a block, the selector
  drafter       the DFlash model
  blocks        anchors, blocks, the mask predicate, labels
  loss          chunked loss
  selection     a DFlash 2's candidates, its walk, the selector's loss
  acceptance    acceptance of blocks: pure tensor functions
  losses        the losses by name, the target's distribution

Training and judging:
  guards        odd hidden states, losses without a number
  checkpoint    save beside training, resume
  drafting      one drafter forward; the gradients of a step
  decode        real speculative decoding, greedy and sampled
  verdict       an evaluation's figures, and what they say
  evaluate      held-out loss and acceptance, the controls
  journal       metrics.jsonl, tensorboard, curves.png
  outcome       bottleneck and held-out figures at the end
  speculators   the speculators layout of config.json, and z-lab's of the same
  reference     a seeded forward: as trained, and by the formulas alone
  verify        is a folder what engines load: every check by name
  export        written aside, checked, published
  setup         data, hidden states and drafter, checked together
  resuming      the checkpoint to go on from, and what may differ from it
  real_decoding     held-out rows decoded for real
  evaluating    --eval-only
  training      a run under way, and its step
  telling       bar, log lines, tables of a run

The planner:
  gpus          memory, bf16 rate and link of GPUs; or as measured
  flops         FLOPs of target and drafter
  footprint     memory of a GPU, item by item
  planner, planner_tables   --plan
"""
