package cli

import (
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// focusColumns are the columns of FOCUS 1.2: all that are mandatory, those of the others that its rows can fill, and ours with x_. An
// empty cell is null.
func focusColumns() []column {
	is := func(text string) func(api.UsageRow) string { return func(api.UsageRow) string { return text } }
	charged := func(r api.UsageRow) string { return r.Charged.String() }
	consumer := func(r api.UsageRow) string { return cell(r.Consumer.ID) }
	return []column{
		{"BilledCost", charged}, {"BillingAccountId", func(r api.UsageRow) string { return cell(r.Tenant) }}, {"BillingAccountName", is("")}, {"BillingCurrency", is("USD")},
		{"BillingPeriodEnd", func(r api.UsageRow) string { return wholeSecond(month(r.At).AddDate(0, 1, 0)) }},
		{"BillingPeriodStart", func(r api.UsageRow) string { return wholeSecond(month(r.At)) }},
		{"ChargeCategory", is("Usage")}, {"ChargeClass", chargeClass},
		{"ChargeDescription", func(r api.UsageRow) string { return "sandbox " + r.Sandbox + " of " + r.Profile }},
		{"ChargeFrequency", is("Usage-Based")},
		{"ChargePeriodEnd", func(r api.UsageRow) string { return wholeSecond(r.Until.Add(time.Second - 1)) }}, // the first second that is not of it
		{"ChargePeriodStart", func(r api.UsageRow) string { return wholeSecond(r.From) }},
		{"ConsumedQuantity", hours}, {"ConsumedUnit", is("Hours")},
		{"ContractedCost", charged}, {"EffectiveCost", charged}, {"InvoiceIssuerName", is("sandboxer")}, {"ListCost", charged},
		{"PricingQuantity", hours}, {"PricingUnit", is("Hours")},
		{"ProviderName", is("sandboxer")}, {"PublisherName", is("sandboxer")},
		{"ResourceId", func(r api.UsageRow) string { return cell(fmt.Sprintf("%s/%s/g%d", r.Tenant, r.Sandbox, r.Generation)) }},
		{"ResourceName", is("")}, {"ResourceType", is("sandbox")},
		{"ServiceCategory", is("Compute")}, {"ServiceName", func(r api.UsageRow) string { return r.Extension }},
		{"SkuId", func(r api.UsageRow) string { return r.Profile }},
		{"SubAccountId", consumer}, {"SubAccountName", consumer}, {"SubAccountType", subAccountType},
		{"Tags", func(r api.UsageRow) string {
			b, _ := json.Marshal(r.Labels) // a map of texts
			if r.Labels == nil {
				return "{}"
			}
			return string(b)
		}},
		{"x_Id", func(r api.UsageRow) string { return r.ID }}, {"x_Corrects", func(r api.UsageRow) string { return r.Corrects }},
		{"x_Cost", func(r api.UsageRow) string { return r.Cost.String() }}, {"x_Overrun", func(r api.UsageRow) string { return r.Overrun.String() }},
		{"x_Final", func(r api.UsageRow) string { return strconv.FormatBool(r.Final) }},
	}
}

// wholeSecond is t in the form of FOCUS, which has no parts of seconds.
func wholeSecond(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// month is the beginning of t's month.
func month(t time.Time) time.Time {
	y, m, _ := t.UTC().Date()
	return time.Date(y, m, 1, 0, 0, 0, 0, time.UTC)
}

// chargeClass is null for a correction of the same billing period, as FOCUS wants it.
func chargeClass(r api.UsageRow) string {
	if r.Type == sandboxer.UsageCorrection && month(r.Until).Before(month(r.At)) {
		return "Correction"
	}
	return ""
}

// hours is the time that a row adds: the row that a correction corrects has it already.
func hours(r api.UsageRow) string {
	if r.Type == sandboxer.UsageCorrection {
		return "0"
	}
	return strconv.FormatFloat(time.Duration(r.Ran).Hours(), 'f', 9, 64)
}

// subAccountType is the kind of the consumer, if there is a consumer.
func subAccountType(r api.UsageRow) string {
	switch {
	case r.Consumer.ID == "":
		return ""
	case r.Consumer.Kind == "":
		return "consumer"
	}
	return cell(r.Consumer.Kind)
}
