package sandboxer

import "time"

// PriceRow is one row of the price book: what a provider takes for one unit of something. Adapters get the
// rows as [Env.Prices].
type PriceRow struct {
	Provider string     `json:"provider"` // such as "e2b"
	SKU      string     `json:"sku"`      // the provider's thing: "vcpu", "memory", …
	Unit     PriceUnit  `json:"unit"`
	NanoUSD  int64      `json:"nano_usd"` // for one unit, in thousand millionths of a US dollar
	Basis    PriceBasis `json:"basis"`
	// Minimum is the shortest time that the provider charges.
	Minimum    time.Duration   `json:"minimum_ns,omitempty"`
	AsOf       string          `json:"as_of"`  // day on which the price was seen, YYYY-MM-DD
	Source     string          `json:"source"` // where
	Confidence PriceConfidence `json:"confidence"`
}

// PriceUnit is what a price is for.
type PriceUnit string

// The units.
const (
	UnitVCPUSecond PriceUnit = "vcpu_s" // one virtual processor for a second
	UnitGiBSecond  PriceUnit = "gib_s"  // one GiB for a second
	UnitOnce       PriceUnit = "once"   // one thing, however long
)

// PriceUnits lists every unit.
func PriceUnits() []PriceUnit { return []PriceUnit{UnitVCPUSecond, UnitGiBSecond, UnitOnce} }

// PriceBasis is the amount that a provider counts.
type PriceBasis string

// The bases.
const (
	BasisAllocated PriceBasis = "allocated" // what was asked for
	BasisMax       PriceBasis = "max"       // what was asked for or used, whichever is more
	BasisActive    PriceBasis = "active"    // what was used
)

// PriceBases lists every basis.
func PriceBases() []PriceBasis { return []PriceBasis{BasisAllocated, BasisMax, BasisActive} }

// PriceConfidence says how sure a price is.
type PriceConfidence string

// The confidences.
const (
	PriceDocumented PriceConfidence = "documented" // the provider says so
	PriceReported   PriceConfidence = "reported"   // others say so
)

// PriceConfidences lists every confidence.
func PriceConfidences() []PriceConfidence {
	return []PriceConfidence{PriceDocumented, PriceReported}
}
