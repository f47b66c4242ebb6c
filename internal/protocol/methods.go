package protocol

import (
	"encoding/json"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// The methods, each with its params and its result.
const (
	MethodProvision     = "provision"             // SpecParams → sandboxer.Handle
	MethodWaitReady     = "wait_ready"            // OfSandbox → sandboxer.Reachability
	MethodTeardown      = "teardown"              // OfSandbox → sandboxer.CleanupReport
	MethodCheck         = "check"                 // SpecParams
	MethodPlace         = "place"                 // PlaceParams → Place
	MethodAdmit         = "admit"                 // AdmitParams
	MethodDefaultLimits = "default_limits"        // SpecParams → sandboxer.Limits
	MethodNotices       = "notices"               // → Notices
	MethodForget        = "forget"                // OfSandbox → Remains
	MethodListPorts     = "list_ports"            // OfSandbox → Ports
	MethodServices      = "services"              // OfSandbox → Services
	MethodCaches        = "caches"                // OnHost; a list of sandboxer.Cache
	MethodPruneCaches   = "prune_caches"          // OnHost; a list of sandboxer.Cache
	MethodExec          = "exec"                  // ExecParams; a command
	MethodReadFile      = "read_file"             // FileParams; data out
	MethodWriteFile     = "write_file"            // FileParams; data in
	MethodStatFile      = "stat_file"             // FileParams → File
	MethodListFiles     = "list_files"            // DirParams; a list of File
	MethodMakeDir       = "make_dir"              // DirParams
	MethodMoveFile      = "move_file"             // MoveParams
	MethodRemoveFile    = "remove_file"           // FileParams
	MethodArchive       = "archive"               // DirParams; data out
	MethodUnarchive     = "unarchive"             // DirParams; data in
	MethodCheckpoint    = "checkpoint"            // OfSandbox; sandboxer.Contents, then data out
	MethodProvisionFrom = "provision_from"        // ProvisionFromParams → sandboxer.Handle; data in
	MethodDial          = "dial"                  // PortParams; data both ways
	MethodExpose        = "expose"                // PortParams → sandboxer.Endpoint
	MethodDialAgent     = "dial_agent"            // OfSandbox; data both ways
	MethodStartProcess  = "start_process"         // StartParams → PID
	MethodAttach        = "attach_process"        // AttachParams; a command
	MethodProcesses     = "list_processes"        // OfSandbox → Processes
	MethodSignal        = "signal_process"        // SignalParams
	MethodWatchFiles    = "watch_files"           // DirParams; a list of Change
	MethodIsAlive       = "is_alive"              // OfSandbox → Alive
	MethodDiscover      = "discover"              // IDParams → sandboxer.Found
	MethodListRunning   = "list_running"          // OwnerParams; a list of sandboxer.Handle
	MethodNotify        = "notify"                // OwnerParams; a list of Notice
	MethodSnapshot      = "snapshot"              // SnapshotParams → sandboxer.Snapshot
	MethodRestore       = "restore_from_snapshot" // RestoreParams → sandboxer.Handle
	MethodDropSnapshot  = "drop_snapshot"         // DropParams
	MethodSnapshots     = "list_snapshots"        // OwnerParams; a list of sandboxer.FoundSnapshot
	MethodEstimateCost  = "estimate_cost"         // CostParams → Quote
	MethodMeterActual   = "meter_actual"          // MeterParams → sandboxer.Usage
	MethodPause         = "pause"                 // OfSandbox
	MethodResume        = "resume"                // OfSandbox
	MethodRenew         = "renew"                 // RenewParams
	MethodCapacity      = "capacity"              // OnHost → sandboxer.HostCapacity
	MethodStats         = "stats"                 // OfSandbox → sandboxer.Stats
	MethodSetNetwork    = "set_network"           // NetworkParams
	MethodBasis         = "basis"                 // SpecParams → Basis
	MethodClaim         = "claim"                 // ClaimParams → sandboxer.Handle
	MethodRecorded      = "recorded"              // of the extension: → Handles
	MethodDescribe      = "describe"              // of a script alone: → sandboxer.Description
)

// OfSandbox are the params of methods for one sandbox; those of most methods embed it.
type OfSandbox struct {
	Handle sandboxer.Handle `json:"handle"`
}

// Params and results of methods, by their names.
type (
	PlaceParams struct {
		SpecParams
		Avoid []string `json:"avoid,omitempty"`
	}
	Place struct {
		Host string `json:"host"`
	}
	AdmitParams struct {
		SpecParams
		Name string `json:"name"`
	}
	Notices struct {
		Notices []string `json:"notices"`
	}
	Remains struct {
		Remains []string `json:"remains"`
	}
	Ports struct {
		Ports []int `json:"ports"`
	}
	Services struct {
		Services []string `json:"services"`
	}
	OnHost struct {
		Host string `json:"host,omitempty"`
	}
	ExecParams struct {
		OfSandbox
		Cmd Cmd `json:"cmd"`
	}
	FileParams struct {
		OfSandbox
		Path Bytes  `json:"path"`
		Mode uint32 `json:"mode,omitempty"`
	}
	DirParams struct {
		OfSandbox
		Dir       Bytes `json:"dir,omitempty"`
		After     Bytes `json:"after,omitempty"`
		Recursive bool  `json:"recursive,omitempty"`
	}
	MoveParams struct {
		OfSandbox
		From Bytes `json:"from"`
		To   Bytes `json:"to"`
	}
	ProvisionFromParams struct {
		SpecParams
		Contents sandboxer.Contents `json:"contents"`
	}
	PortParams struct {
		OfSandbox
		Port int `json:"port"`
	}
	StartParams struct {
		OfSandbox
		Process Process `json:"process"`
	}
	PID struct {
		PID int `json:"pid"`
	}
	AttachParams struct {
		OfSandbox
		PID    int  `json:"pid"`
		Replay bool `json:"replay,omitempty"`
		Stdin  bool `json:"stdin,omitempty"`
	}
	Processes struct {
		Processes []Process `json:"processes"`
	}
	SignalParams struct {
		OfSandbox
		PID    int `json:"pid"`
		Signal int `json:"signal"`
	}
	Alive struct {
		Liveness sandboxer.Liveness `json:"liveness"`
	}
	IDParams struct {
		ID string `json:"id"`
	}
	OwnerParams struct {
		Owner string `json:"owner"`
	}
	Notice struct {
		SandboxID string `json:"sandbox_id"`
	}
	SnapshotParams struct {
		OfSandbox
		ID string `json:"id"`
	}
	RestoreParams struct {
		SpecParams
		Snapshot sandboxer.Snapshot `json:"snapshot"`
	}
	DropParams struct {
		Snapshot sandboxer.Snapshot `json:"snapshot"`
	}
	CostParams struct {
		SpecParams
		DurationMS int64 `json:"duration_ms"`
	}
	Quote struct {
		Quote *sandboxer.MeterQuote `json:"quote"`
	}
	MeterParams struct {
		OfSandbox
		DurationMS int64 `json:"duration_ms"`
	}
	RenewParams struct {
		OfSandbox
		Until time.Time `json:"until"`
	}
	NetworkParams struct {
		OfSandbox
		Policy sandboxer.NetworkPolicy `json:"policy"`
	}
	Basis struct {
		Basis string `json:"basis"`
	}
	ClaimParams struct {
		OfSandbox
		SpecParams
	}
	RecordedParams struct {
		Skip int `json:"skip,omitempty"`
	}
	Handles struct {
		Handles []sandboxer.Handle `json:"handles"`
		More    bool               `json:"more,omitempty"` // ask again, and skip these too
	}
)

// PageOf returns the part of all that one answer has room for, from the skip-th on.
func PageOf(all []sandboxer.Handle, skip int) Handles {
	page := Handles{Handles: []sandboxer.Handle{}}
	size := 0
	for _, h := range all[min(max(skip, 0), len(all)):] {
		j, err := json.Marshal(h)
		if size += len(j); err != nil || size > MaxLine/2 {
			page.More = true
			break
		}
		page.Handles = append(page.Handles, h)
	}
	return page
}
